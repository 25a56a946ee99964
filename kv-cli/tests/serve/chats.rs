//! Sources of a chat template, and the effects of a broken one.
use std::fs;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value as Meta};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, safetensors};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Case;
use crate::client::{COMPLETIONS, greedy, post, text_of};
use crate::server::{Server, chat_model};

pub(crate) const CASES: &[Case] = &[
    ("chats/a_broken_template_costs_the_chats_alone", broken),
    ("chats/the_first_template_is_used", order),
    ("chats/a_template_of_a_gguf_file_names_its_tokens", gguf_tokens),
    ("chats/what_transformers_adds_to_templates_is_there", added_names),
];

const CHATS: &str = "/v1/chat/completions";

fn chat() -> Value {
    json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0})
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Makes a folder with the bundled weights as a GGUF file, its tokenizer, and more metadata.
fn gguf_model(more: &[(&str, Meta)]) -> TempDir {
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K");
    let config = fs::read_to_string(bundled.join("config.json")).expect("config.json");
    let config: Value = serde_json::from_str(&config).expect("JSON");
    let number = |field: &str| {
        let number = config[field].as_u64().unwrap_or_else(|| panic!("{field}"));
        Meta::U32(u32::try_from(number).expect("small"))
    };
    let mut metadata = vec![
        ("general.architecture", Meta::String("llama".to_owned())),
        ("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5)),
    ];
    for (key, field) in [
        ("llama.embedding_length", "hidden_size"),
        ("llama.block_count", "num_hidden_layers"),
        ("llama.attention.head_count", "num_attention_heads"),
        ("llama.attention.head_count_kv", "num_key_value_heads"),
        ("llama.feed_forward_length", "intermediate_size"),
        ("llama.context_length", "max_position_embeddings"),
    ] {
        metadata.push((key, number(field)));
    }
    metadata.extend(more.iter().cloned());
    let tensors = safetensors::load(bundled.join("model.safetensors"), &Device::Cpu);
    let tensors = tensors.expect("weights").into_iter().map(|(name, tensor)| {
        let tensor = QTensor::quantize(&tensor, GgmlDType::F32).expect("f32");
        (gguf_name(&name), tensor)
    });
    let tensors: Vec<_> = tensors.collect();
    let folder = TempDir::new().expect("a folder");
    let mut file = fs::File::create(folder.path().join("model.gguf")).expect("a file");
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut file, &metadata, &tensors).expect("written");
    let tokenizer = bundled.canonicalize().expect("a model").join("tokenizer.json");
    std::os::unix::fs::symlink(tokenizer, folder.path().join("tokenizer.json")).expect("a link");
    folder
}

/// Returns the name of a tensor. The order of rows in Q and K is not that of the format, so that
/// its texts are of no use.
fn gguf_name(name: &str) -> String {
    let name = name.replace("model.embed_tokens", "token_embd").replace("model.layers", "blk");
    let name = name.replace("model.norm", "output_norm").replace("lm_head", "output");
    let name = name.replace("post_attention_layernorm", "ffn_norm");
    let name = name.replace("input_layernorm", "attn_norm");
    let name = name.replace("self_attn.o_proj", "attn_output");
    let name = name.replace("self_attn.", "attn_").replace("mlp.", "ffn_");
    name.replace("_proj", "")
}

fn broken() {
    let folder = chat_model();
    let model = text(folder.path()).to_owned();
    let file = folder.path().join("t.jinja");
    let config = folder.path().join("tokenizer_config.json");
    for (source, words) in [
        (&b"{% for %}"[..], "syntax error"),
        (b"{% generation %}{{ messages[0].content }}", "syntax error"),
        (b"{{ frobnicate(messages) }}", "frobnicate"),
        (b"{{ messages | frobnicate }}", "frobnicate"),
        (b"caf\xe9", "UTF-8"),
    ] {
        fs::write(&file, source).expect("a file");
        let server = Server::start(&["--model", &model, "--chat-template", text(&file)]);
        for _ in 0..2 {
            let error = post(server.address(), CHATS, &chat()).error(501);
            let message = error["message"].as_str().expect("text");
            assert!(message.contains(words) && message.contains("t.jinja"), "{message}");
        }
        text_of(&post(server.address(), COMPLETIONS, &greedy("Once", 4)));
        let log = server.end_with_log();
        assert_eq!(log.lines().count(), 1, "{log}");
        assert!(log.contains("t.jinja") && log.contains(words), "{log}");
    }
    fs::remove_file(folder.path().join("chat_template.jinja")).expect("a file");
    for (source, words) in [("{", "EOF"), ("[]", "map"), (r#"{"chat_template": 5}"#, "no text")] {
        fs::write(&config, source).expect("a file");
        let server = Server::start(&["--model", &model]);
        let error = post(server.address(), CHATS, &chat()).error(501);
        assert!(error["message"].as_str().expect("text").contains(words), "{error}");
        text_of(&post(server.address(), COMPLETIONS, &greedy("Once", 4)));
        let log = server.end_with_log();
        assert!(log.lines().count() == 1 && log.contains("tokenizer_config.json"), "{log}");
    }
}

/// Each template refuses everything in its own words.
fn order() {
    let refusal = |name: &str| format!("{{{{ raise_exception('the words of {name}') }}}}");
    let folder = gguf_model(&[("tokenizer.chat_template", Meta::String(refusal("gguf")))]);
    let path = folder.path();
    let tokenizer = TempDir::new().expect("a folder");
    let link = tokenizer.path().join("tokenizer.json");
    let target = path.join("tokenizer.json").canonicalize().expect("a file");
    std::os::unix::fs::symlink(target, &link).expect("a link");
    let config = |name: &str| json!({"chat_template": refusal(name)}).to_string();
    let given = path.join("given.jinja");
    let write = |path: &Path, name: &str, text: String| fs::write(path.join(name), text);
    let file = path.join("model.gguf");
    let args = ["--model", text(&file), "--tokenizer", text(&link)];
    let check = |args: &[&str], name: &str| {
        let server = Server::start(args);
        let error = post(server.address(), CHATS, &chat()).error(400);
        let message = error["message"].as_str().expect("text").to_owned();
        assert!(message.contains(&format!("the words of {name}")), "{name}: {message}");
        server.end();
    };
    check(&args, "gguf");
    write(path, "tokenizer_config.json", "{\"chat_template\": null}".to_owned()).expect("a file");
    check(&args, "gguf");
    write(path, "tokenizer_config.json", config("model-config")).expect("a file");
    check(&args, "model-config");
    write(tokenizer.path(), "tokenizer_config.json", config("config")).expect("a file");
    check(&args, "config");
    write(path, "chat_template.jinja", refusal("model-file")).expect("a file");
    check(&args, "model-file");
    write(tokenizer.path(), "chat_template.jinja", refusal("file")).expect("a file");
    check(&args, "file");
    fs::write(&given, refusal("given")).expect("a file");
    check(&[&args[..], &["--chat-template", text(&given)]].concat(), "given");
}

fn gguf_tokens() {
    let words = ["<unk>", "<s>", "</s>"].map(|word| Meta::String(word.to_owned())).to_vec();
    let source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}";
    let folder = gguf_model(&[
        ("tokenizer.chat_templates", Meta::Array(vec![Meta::String("rag".to_owned())])),
        ("tokenizer.chat_template.rag", Meta::String("wrong".to_owned())),
        ("tokenizer.chat_template.default", Meta::String(source.to_owned())),
        ("tokenizer.ggml.tokens", Meta::Array(words)),
        ("tokenizer.ggml.bos_token_id", Meta::U32(1)),
        ("tokenizer.ggml.eos_token_id", Meta::U32(2)),
    ]);
    let server = Server::start(&["--model", text(&folder.path().join("model.gguf"))]);
    let answer = post(server.address(), CHATS, &chat());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let plain = post(server.address(), COMPLETIONS, &greedy("<s>Hello</s>", 4));
    let tokens = |answer: &Value| answer["usage"]["prompt_tokens"].clone();
    assert_eq!(tokens(&answer.json()), tokens(&plain.json()));
    let content = &answer.json()["choices"][0]["message"]["content"];
    assert_eq!(content.as_str(), Some(text_of(&plain).0.as_str()));
    server.end();
}

fn added_names() {
    let folder = chat_model();
    let source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\
        {% endfor %} {{ strftime_now('%Y')|length }}{{ m is defined }}{{ tools is none }}\
        {{ {'b': '<', 'a': 1} | tojson(ensure_ascii=False) }}";
    fs::write(folder.path().join("chat_template.jinja"), source).expect("a file");
    let server = Server::start(&["--model", text(folder.path())]);
    let answer = post(server.address(), CHATS, &chat());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let prompt = r#"Hello 4FalseTrue{"b": "<", "a": 1}"#;
    let plain = post(server.address(), COMPLETIONS, &greedy(prompt, 4));
    let content = &answer.json()["choices"][0]["message"]["content"];
    assert_eq!(content.as_str(), Some(text_of(&plain).0.as_str()));
    server.end();
}
