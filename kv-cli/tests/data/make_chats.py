"""Records what transformers makes of chat templates.

Usage: python make_chats.py

Writes chats.json: templates, messages, and the prompt that `apply_chat_template` of transformers
renders from them with `add_generation_prompt=True`, or the message of its refusal. The templates
named after families of models are shorter than the published ones and use the same constructs; the
others are one construct each. The clock stands at NOW, and the time zone is UTC.

Recorded with transformers 5.24.0 and Jinja2 3.1.6.
"""

import datetime
import json
import os

import jinja2
import transformers
from transformers.utils import chat_template_utils

HERE = os.path.dirname(os.path.abspath(__file__))
NOW = datetime.datetime(2026, 2, 3, 14, 5, 6, 78)


class Clock(datetime.datetime):
    """A clock that stands."""

    @classmethod
    def now(cls, tz=None):
        return NOW


chat_template_utils.datetime = Clock

USER = {"role": "user", "content": "What is 2 < 3 & 'so on'?"}
SYSTEM = {"role": "system", "content": " Be brief.\n"}
ANSWER = {"role": "assistant", "content": "<think>\nTwo, three.\n</think>\n\nYes."}
LAST = {"role": "user", "content": "Caf\u00e9 \u4e16\u754c?  "}
CHATS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, LAST],
    "no_system": [USER, ANSWER, LAST],
    "two_users": [USER, LAST],
    "no_think": [{"role": "system", "content": "/no_think Be kind."}, USER],
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Templates with the constructs of a family: rendered with every chat.
FAMILIES = {
    "chatml": """{% for message in messages %}\
{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are helpful<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}""",
    "smollm3": """{# defaults #}
{%- if enable_thinking is not defined -%}
{%- set enable_thinking = true -%}
{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{{- "<|im_start|>system\\n" -}}
{%- if messages[0].role == "system" -%}
  {%- set system_message = messages[0].content -%}
  {%- if "/no_think" in system_message -%}
    {%- set mode = "/no_think" -%}
  {%- endif -%}
  {%- set custom = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{%- set today = strftime_now("%d %B %Y") -%}
{{- "Today Date: " ~ today ~ "\\n" -}}
{{- "Reasoning Mode: " + mode + "\\n\\n" -}}
{%- if custom -%}{{- custom + "\\n\\n" -}}{%- endif -%}
{%- if xml_tools or python_tools or tools -%}{{- "### Tools\\n" -}}{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if mode == "/think" -%}
            {{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" + content.lstrip() + "<|im_end|>\\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if mode == "/think" -%}{{ "<|im_start|>assistant\\n" }}
    {%- else -%}{{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" }}{%- endif -%}
{%- endif -%}
""",
    "llama3": """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {{- raise_exception("no first user message") }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one call at once") }}
        {%- endif %}
        {{- message.tool_calls[0].function.arguments | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "mistral": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
""",
    "mistral_small3": """{%- set today = strftime_now("%Y-%m-%d") %}
{%- set default_system_message = "You are Small 3.\\nYour knowledge ends on 2023-10-01. The current date is " + today + ".\\n\\nWhen unsure, say so" %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}
        {%- set system_message = messages[0]['content'] %}
    {%- else %}
        {%- set system_message = messages[0]['content'][0]['text'] %}
    {%- endif %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = default_system_message %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}
            {{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}{{- block['text'] }}
                {%- elif block['type'] in ['image', 'image_url'] %}{{- '[IMG]' }}
                {%- else %}{{- raise_exception('Only text and image blocks are supported') }}{%- endif %}
            {%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}""",
    "gemma": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
""",
    "phi": """{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>
' + message['content'] + '<|end|>
'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}""",
    "qwen3": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
                {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    "granite3": """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Knowledge Cutoff Date: April 2024.
Today's Date: " + strftime_now('%B %d, %Y') + ".
You are Granite." %}
    {%- if tools and documents %}
        {%- set system_message = system_message + " You use tools and documents." %}
    {%- elif tools %}
        {%- set system_message = system_message + " You use tools." %}
    {%- elif thinking %}
        {%- set system_message = system_message + " You think." %}
    {%- endif %}
    {%- if 'citations' in controls and documents %}
        {%- set system_message = system_message + ' Cite.' %}
    {%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>
' }}
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' }}
    {{- tools | tojson(indent=4) }}
    {{- '<|end_of_text|>
' }}
{%- endif %}
{%- if documents %}
    {%- for document in documents %}
        {{- 'Document ' + loop.index0 | string + '\\n' + document['text'] }}
        {%- if not loop.last %}{{- '\\n\\n'}}{%- endif%}
    {%- endfor %}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>
' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
            {%- if controls %}{{- ' ' + controls | tojson()}}{%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}""",
    "olmo2": """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>
' + message['content'] + '
' }}{% elif message['role'] == 'user' %}{{ '<|user|>
' + message['content'] + '
' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>
'  + message['content'] + eos_token + '
' }}{% else %}{{ '<|assistant|>
'  + message['content'] + eos_token }}{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>
' }}{% endif %}{% endfor %}""",
}

TOOL = """{% set tool = {"type": "function", "function": {"name": "look <up> & 'say'", "unit": none, \
"b": [1, 2.5, -0.0, 1e30, true, false], "a": {}, "e": [], "t": "caf\u00e9 \\"q\\" \\\\ \\n\\t \u4e16 \U0001f600 \x7f"}} %}"""

# One construct each, rendered with the chat "turns".
CONSTRUCTS = {
    # generation
    "generation": "{% for m in messages %}{% generation %}[{{ m.role }}]{% endgeneration %}{% endfor %}",
    "generation_trims": "a \n {%- generation -%} \n b \n {%- endgeneration -%} \n c",
    "generation_lines": "a\n  {% generation %}\n  b\n  {% endgeneration %}\nc\n",
    "generation_plus": "a\n  {%+ generation +%}\n  b\n  {%+ endgeneration +%}\nc\n",
    "generation_no_blanks": "{%generation%}b{%endgeneration%}{%-generation-%} c {%-endgeneration-%}",
    "generation_many_blanks": "{%   generation\n %}b{%\tendgeneration\t%}",
    "generation_scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "generation_namespace": "{% set ns = namespace(x=1) %}{% generation %}{% set ns.x = 2 %}{% endgeneration %}{{ ns.x }}",
    "generation_nested": "{% generation %}a{% generation %}b{% endgeneration %}c{% endgeneration %}",
    "generation_in_raw": "{% raw %}{% generation %}{{ x }}{% endgeneration %}{% endraw %}",
    "generation_in_raw_trimmed": "a {%- raw -%} {% generation %} {%- endraw -%} b {% generation %}c{% endgeneration %}",
    "generation_in_comment": "{# {% generation %} {{ #}x{#- {% endgeneration %} -#} y",
    "generation_in_text": "{{ '{% generation %}' }}{{ \"%}{% endgeneration %}\" }}",
    "generation_in_block_text": "{% set x = '%}{% generation %}' %}{{ x }}{% if '{% raw %}' %}{% generation %}y{% endgeneration %}{% endif %}",
    "generation_as_a_name": "{% set generation = 5 %}{{ generation }}{% if generation %}{{ generation + 1 }}{% endif %}",
    "generation_in_data": "{ % generation % } generation endgeneration { {% generation %} }{% endgeneration %}",
    "generation_escaped_quote": "{{ 'it\\'s {% generation %}' }}{% generation %}\"{% endgeneration %}",
    "generation_braces": "{{ {'a': {'b': '}}'}}['a']['b'] }}{% generation %}x{% endgeneration %}",
    "generation_in_macro": "{% macro f(x) %}{% generation %}<{{ x }}>{% endgeneration %}{% endmacro %}{{ f(1) }}{{ f('a') }}",
    "generation_sees_loop": "{% for m in messages %}{% generation %}{{ loop.index }}{% endgeneration %}{% endfor %}",
    # the clock
    "strftime_date": "{{ strftime_now('%d %B %Y') }}|{{ strftime_now('%Y-%m-%d') }}|{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%B %d, %Y') }}",
    "strftime_time": "{{ strftime_now('%H:%M:%S %I %p %A %a %j %U %W %w %y %%') }}",
    "strftime_more": "{{ strftime_now('%c|%x|%X|%D|%F|%T|%R|%e|%h|%n|%t|%G|%V|%u|%C|%k|%l|%s') }}",
    "strftime_flags": "{{ strftime_now('%-d %-m %-H %-I %-M %-j %_d') }}",
    "strftime_fraction_and_zone": "{{ strftime_now('%S.%f') }}[{{ strftime_now('%z') }}][{{ strftime_now('%Z') }}]",
    "strftime_keyword": "{{ strftime_now(format='%Y') }}",
    "strftime_plain": "{{ strftime_now('') }}{{ strftime_now('no directive') }}{{ strftime_now('caf\u00e9 %Y') }}",
    "strftime_set": "{% set d = strftime_now('%Y')|int + 1 %}{{ d }}",
    # refusals
    "raise": "{{ raise_exception('no: ' ~ messages|length) }}",
    "raise_in_expression": "{{ 'x' if messages else raise_exception('never') }}",
    "raise_quotes": "{{ raise_exception(\"it's <this> & \\\"that\\\"\") }}",
    # tojson
    "tojson": TOOL + "{{ tool | tojson }}",
    "tojson_indent": TOOL + "{{ tool | tojson(indent=2) }}",
    "tojson_indent_4": TOOL + "{{ tool | tojson(indent=4) }}",
    "tojson_indent_0": TOOL + "{{ tool | tojson(indent=0) }}",
    "tojson_indent_text": TOOL + "{{ tool | tojson(indent='\\t') }}",
    "tojson_ascii": TOOL + "{{ tool | tojson(ensure_ascii=true) }}",
    "tojson_not_ascii": TOOL + "{{ tool | tojson(ensure_ascii=False) }}",
    "tojson_separators": TOOL + "{{ tool | tojson(separators=(',', ':')) }}",
    "tojson_separators_indent": TOOL + "{{ tool | tojson(indent=2, separators=(', ', ' = ')) }}",
    "tojson_sorted": TOOL + "{{ tool | tojson(sort_keys=true) }}",
    "tojson_places": TOOL + "{{ tool | tojson(true, 2, none, true) }}",
    "tojson_scalars": "{{ 1 | tojson }}{{ none | tojson }}{{ true | tojson }}{{ 'a<b>' | tojson }}{{ 1.0 | tojson }}{{ [] | tojson }}{{ {} | tojson(indent=2) }}{{ [[]] | tojson(indent=1) }}",
    "tojson_numbers": "{{ [0.1, 1e16, 1e15, 123456789.125, 1e-5, 0.0001, 1e100, 12345678901234567890] | tojson }}",
    "tojson_keys": "{{ {1: 'a', true: 'b', none: 'c', 2.5: 'd'} | tojson }}",
    "tojson_message": "{{ messages[0] | tojson }}{{ messages[1] | tojson(indent=2) }}",
    "tojson_messages": "{{ messages | tojson }}",
    "tojson_then": "{{ ({'a': '<'} | tojson) + '<' }}{{ ({'a': '<'} | tojson) | length }}{{ '%s' | format({'a': 1} | tojson) }}",
    "tojson_controls": "{{ '\\x00\\x1f\\u2028\\b\\f' | tojson }}",
    # order of maps
    "map_order": "{% set m = {'z': 1, 'a': 2, 'k': 3} %}{% for k, v in m.items() %}{{ k }}={{ v }},{% endfor %}{{ m.keys() | list }}{{ m.values() | list }}{{ m | dictsort }}{{ m }}",
    "map_get": "{% set m = {'z': 1} %}{{ m.get('z') }}{{ m.get('y') }}{{ m.get('y', 'd') }}{{ 'z' in m }}{{ m.z }}{{ m['y'] }}",
    "map_dict": "{% set m = dict(b=1, a='x') %}{{ m }}{{ m | tojson }}{{ dict(m, c=3) }}",
    # strings
    "string_strip": "[{{ ' \\n a \\t'.strip() }}][{{ 'xxaxx'.strip('x') }}][{{ ' a '.lstrip() }}][{{ ' a '.rstrip() }}][{{ 'ab'.rstrip('b') }}]",
    "string_split": "{{ 'a  b c'.split() }}{{ 'a,b,,c'.split(',') }}{{ 'a,b,c'.split(',', 1) }}{{ 'a b c'.rsplit(' ', 1) }}{{ ''.split(',') }}{{ 'a\\nb\\n'.splitlines() }}",
    "string_split_last": "{{ messages[2].content.split('</think>')[-1].strip() }}{{ messages[2].content.split('</think>') | last | trim }}",
    "string_partition": "{{ 'a=b=c'.partition('=') }}{{ 'a=b=c'.rpartition('=') }}{{ 'abc'.partition('=') }}",
    "string_affixes": "{{ 'abc'.removeprefix('a') }}{{ 'abc'.removesuffix('bc') }}{{ 'abc'.removeprefix('x') }}{{ 'abc'.startswith('ab') }}{{ 'abc'.endswith(('x', 'c')) }}",
    "string_case": "{{ 'aB c'.upper() }}{{ 'aB c'.lower() }}{{ 'aB c'.title() }}{{ 'aB c'.capitalize() }}{{ 'aB' | upper }}{{ 'aB c' | title }}{{ 'aB c' | capitalize }}",
    "string_find": "{{ 'abcabc'.find('c') }}{{ 'abcabc'.rfind('c') }}{{ 'abc'.find('x') }}{{ 'abcabc'.count('bc') }}{{ 'abc'.index('b') }}",
    "string_replace": "{{ 'aaa'.replace('a', 'b') }}{{ 'aaa'.replace('a', 'b', 2) }}{{ 'aaa' | replace('a', 'c') }}",
    "string_join": "{{ ', '.join(['a', 'b']) }}{{ ['a', 'b'] | join('-') }}{{ messages | map(attribute='role') | join('|') }}",
    "string_format": "{{ '{} {x}'.format('a', x='b') }}{{ '{0}{1}{0}'.format('a', 'b') }}{{ '%05d|%x' | format(42, 255) }}",
    "string_tests": "{{ '12'.isdigit() }}{{ 'ab'.isalpha() }}{{ 'a1'.isalnum() }}{{ ' '.isspace() }}{{ 'ab'.islower() }}{{ 'AB'.isupper() }}",
    "string_concat": "{{ 'a' ~ 1 ~ none ~ true ~ 1.5 ~ [1, 'x'] }}{{ 'ab' * 2 }}{{ 'a' + 'b' }}{{ 'a' 'b' }}",
    "string_slices": "{{ 'abcdef'[1:3] }}{{ 'abcdef'[-2:] }}{{ 'abcdef'[::-1] }}{{ 'abcdef'[:-1] }}{{ 'abcdef'[0] }}{{ 'abcdef'[-1] }}{{ 'abcdef'[::2] }}",
    "string_filters": "{{ ' a ' | trim }}{{ 'abc' | length }}{{ 'abc' | first }}{{ 'abc' | last }}{{ 'a\\nb' | indent(2) }}{{ 'a\\nb' | indent(2, true) }}{{ '<a>' | escape }}{{ 'abc' | reverse }}",
    "string_escapes": "{{ 'a\\tb\\u00e9\\x41' }}{{ \"it's\" }}{{ 'say \"x\"' }}",
    # printing
    "printing": "{{ true }}{{ false }}{{ none }}{{ 1.0 }}{{ 0.1 + 0.2 }}{{ [1, 'a', none, true, \"it's\"] }}{{ {'a': 1, 'b': [2.0]} }}{{ (1, 'a') }}{{ (1,) }}{{ () }}{{ 'caf\u00e9\\n' }}{{ ['caf\u00e9\\n\\\\'] }}",
    "printing_undefined": "[{{ nothing }}][{{ messages[0].nothing }}][{{ nothing | default('d') }}][{{ nothing is defined }}][{{ none | default('d') }}][{{ '' | default('d', true) }}]",
    # arithmetic
    "arithmetic": "{{ 7 // 2 }},{{ 7 / 2 }},{{ 4 / 2 }},{{ -7 // 2 }},{{ 7 % 3 }},{{ -7 % 3 }},{{ 2 ** 10 }},{{ 2 ** -1 }},{{ 1 + 2 * 3 }},{{ 10 | abs }},{{ '3' | int + 1 }},{{ '2.5' | float }},{{ 2.567 | round(1) }},{{ 3.7 | int }}",
    "comparisons": "{{ 1 < 2 }}{{ 1 == 1.0 }}{{ 'a' < 'b' }}{{ 1 < 2 < 3 }}{{ 3 > 2 > 2 }}{{ not 1 == 2 }}{{ 'a' in 'abc' }}{{ 1 not in [1] }}{{ none == none }}{{ true == 1 }}{{ [1] == [1] }}",
    "logic": "{{ 'a' or 'b' }}{{ '' or 'b' }}{{ 'a' and 'b' }}{{ none and 'b' }}{{ not '' }}{{ 'x' if false }}{{ 'x' if false else 'y' }}",
    # tests
    "tests": "{{ 'a' is string }}{{ 1 is number }}{{ 1 is integer }}{{ 1.5 is float }}{{ {} is mapping }}{{ [] is iterable }}{{ 'a' is iterable }}{{ [] is sequence }}{{ 'a' is sequence }}{{ {} is sequence }}{{ 1 is sequence }}{{ none is none }}{{ true is boolean }}{{ true is true }}{{ 1 is true }}{{ 2 is even }}{{ 3 is odd }}{{ 4 is divisibleby(2) }}{{ 'a' is eq('a') }}{{ 1 is in [1] }}{{ 'AB' is upper }}{{ nothing is undefined }}",
    "none_of_tools": "{{ tools is none }}{{ tools is defined }}{{ documents is none }}{{ documents is defined }}{{ 'yes' if tools else 'no' }}",
    "tokens": "{{ bos_token }}{{ eos_token }}[{{ unk_token }}]{{ unk_token is defined }}{{ bos_token is defined }}",
    # loops
    "loop": "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.cycle('a', 'b') }},{% endfor %}",
    "loop_neighbours": "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined }}<{{ m.role }}>{{ loop.nextitem.role if loop.nextitem is defined }},{% endfor %}",
    "loop_changed": "{% for m in messages %}{% if loop.changed(m.role) %}{{ m.role }}{% endif %}{% endfor %}",
    "loop_if_else": "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content | trim }}{% endfor %}{% for m in [] %}x{% else %}none{% endfor %}",
    "loop_break_continue": "{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "loop_pairs": "{% for a, b in [(1, 2), (3, 4)] %}{{ a }}{{ b }}{% endfor %}{% for k in {'x': 1} %}{{ k }}{% endfor %}{% for i in range(3, 9, 2) %}{{ i }}{% endfor %}{% for c in 'ab' %}{{ c }}.{% endfor %}",
    "loop_recursive": "{% for n in [{'v': 1, 'c': [{'v': 2, 'c': []}]}] recursive %}{{ n.v }}({{ loop(n.c) }}){% endfor %}",
    "loop_scope": "{% set x = 1 %}{% for i in [1, 2] %}{% set x = i + 10 %}{{ x }}{% endfor %}{{ x }}",
    # lists
    "list_slices": "{{ [1, 2, 3, 4][1:] }}{{ [1, 2, 3, 4][:-1] }}{{ [1, 2, 3, 4][::-1] }}{{ [1, 2, 3][-1] }}{{ messages[1:] | length }}{{ messages[-1].role }}{{ (messages | last).role }}",
    "list_filters": "{{ [3, 1, 2] | sort }}{{ [3, 1, 2] | max }}{{ [1, 2] | sum }}{{ [1, 1, 2] | unique | list }}{{ [1, 2] | first }}{{ [[1, 2], [3]] | map('length') | list }}{{ ['a', 'b'] | map('upper') | list }}{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2] | reverse | list }}{{ [1, 2] + [3] }}{{ 'abc' | list }}{{ [1, 2, 3] | count }}",
    "list_select": "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | rejectattr('role', 'eq', 'user') | map(attribute='role') | list }}{{ [1, none, 2] | select | list }}{{ [1, 2, 3] | select('odd') | list }}{{ [1, 2, 3] | reject('>', 2) | list }}{{ messages | groupby('role') | map('first') | list }}{{ messages | selectattr('role', 'in', ['user']) | list | length }}{{ messages | selectattr('nothing', 'defined') | list }}",
    "list_methods": "{{ [1, 2, 1].count(1) }}{{ [1, 2].index(2) }}",
    # blocks
    "macro": "{% macro f(a, b='d', c=none) -%} [{{ a }}{{ b }}{{ c }}] {%- endmacro %}{{ f(1) }}{{ f(1, 2) }}{{ f(1, c=3) }}{{ f('x', b='y') | length }}",
    "macro_recursive": "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
    "macro_sees_globals": "{% set x = 5 %}{% macro f() %}{{ x }}{{ messages | length }}{% endmacro %}{{ f() }}",
    "macro_varargs": "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}body{% endcall %}",
    "set_block": "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% set y | upper %}abc{% endset %}{{ y }}{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "filter_block": "{% filter upper %}abc{% endfilter %}",
    "with_block": "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}",
    "do_namespace": "{% set ns = namespace(items=[], n=0, s='') %}{% for m in messages %}{% set ns.items = ns.items + [m.role] %}{% set ns.n = ns.n + 1 %}{% set ns.s = ns.s ~ m.role[0] %}{% endfor %}{{ ns.items }}{{ ns.n }}{{ ns.s }}",
    "if_scope": "{% if true %}{% set x = 1 %}{% endif %}{{ x }}",
    "raw": "{% raw %}{{ x }}{% y %}{# z #}{% endraw %}",
    # blanks
    "trim_blocks": "a\n{% if true %}\nb\n{% endif %}\nc\n",
    "lstrip_blocks": "a\n    {% if true %}\n  b\n    {% endif %}\n  {{ 'c' }}\n",
    "trim_comments": "a\n    {# x #}\nb {# y #}\nc",
    "trim_marks": "a  {%- if true -%}  b  {%- endif -%}  c  {{- 'd' -}}  e  {#- x -#}  f",
    "trim_plus": "a\n    {%+ if true +%}\nb{% endif %}\n",
    "trim_inline": "a {% if true %} b {% endif %} c",
    "trim_tabs": "a\n\t {% if true %}\t\nb{% endif %}",
    "trailing_newline": "a\n",
    "trailing_newlines": "a\n\n",
    "carriage_returns": "a\r\n{% if true %}\r\nb\r\n{% endif %}\r\nc\r{{ 'd\r\ne' }}\r\n",
    "blank_lines": "\n\n{% for i in [1, 2] %}\n\n{{ i }}\n\n{% endfor %}\n\n",
    "empty": "",
    # not of this engine
    "other_percent": "{{ '%s has %d of %.2f' % ('a', 3, 0.5) }}",
    "other_wordcount": "{{ 'a b' | wordcount }}",
    "other_large_float": "{{ 1e20 }}",
    "other_callable": "{{ raise_exception is callable }}",
    # broken
    "broken_end": "{% for m in messages %}{{ m.role }}",
    "broken_generation": "{% generation %}x",
    "broken_statement": "{% frobnicate %}",
    "broken_function": "{{ frobnicate(1) }}",
    "broken_filter": "{{ 1 | frobnicate }}",
    "broken_attribute": "{{ nothing.more.and_more }}",
}


def render(template, messages):
    rendered, _ = chat_template_utils.render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, **TOKENS
    )
    return rendered[0]


def case(name, template, chat):
    entry = {"name": name, "template": template, "chat": chat}
    try:
        entry["prompt"] = render(template, CHATS[chat])
    except Exception as error:
        entry["refusal"] = str(error)
    return entry


def main():
    cases = [case(f"{name}/{chat}", FAMILIES[name], chat) for name in FAMILIES for chat in CHATS]
    cases += [case(name, template, "turns") for name, template in CONSTRUCTS.items()]
    document = {
        "schema": "chat-templates/1",
        "provenance": {
            "script": "make_chats.py",
            "transformers": transformers.__version__,
            "jinja2": jinja2.__version__,
            "now": NOW.isoformat(),
        },
        "tokens": TOKENS,
        "chats": CHATS,
        "cases": cases,
    }
    with open(os.path.join(HERE, "chats.json"), "w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    refused = [entry["name"] for entry in cases if "refusal" in entry]
    print(f"{len(cases)} cases, refused: {', '.join(refused)}")


main()
