//! Fields of OpenAI's and other servers' APIs that would change an answer and are not supported. A
//! request with such a field is refused rather than answered with another text.
//!
//! # Source
//! The references of OpenAI's completions and chats, of llama.cpp's `server`, of vLLM's
//! `SamplingParams` and extra parameters, of the sampling parameters of `SGLang`, and of Text
//! Generation Inference. What only matters together with another field of the list is not on it,
//! nor is what changes the speed alone.

/// Names, and the JSON of values that change nothing.
pub(super) const UNSUPPORTED: &[(&str, &[&str])] = &[
    // OpenAI's.
    ("audio", &[]),
    ("echo", &["false"]),
    ("frequency_penalty", &["0"]),
    ("function_call", &["\"none\""]),
    ("functions", &["[]"]),
    ("logit_bias", &["{}", "[]"]),
    ("logprobs", &["false"]),
    ("modalities", &["[\"text\"]"]),
    ("prediction", &[]),
    ("presence_penalty", &["0"]),
    ("reasoning", &[]),
    ("reasoning_effort", &["\"none\""]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("suffix", &["\"\""]),
    ("tool_choice", &["\"none\""]),
    ("tools", &["[]"]),
    ("top_logprobs", &["0"]),
    ("verbosity", &[]),
    ("web_search_options", &[]),
    // Which tokens may come next.
    ("adaptive_target", &["-1"]),
    ("allowed_token_ids", &[]),
    ("bad_words", &["[]"]),
    ("bad_words_ids", &["[]"]),
    ("custom_logit_processor", &[]),
    ("custom_params", &[]),
    ("dry_multiplier", &["0"]),
    ("dynatemp_range", &["0"]),
    ("encoder_repetition_penalty", &["1"]),
    ("epsilon_cutoff", &["0"]),
    ("eta_cutoff", &["0"]),
    ("logits_processors", &["[]"]),
    ("min_p", &["0"]),
    ("mirostat", &["0"]),
    ("no_repeat_ngram_size", &["0"]),
    ("penalty_alpha", &["0"]),
    ("repeat_penalty", &["1"]),
    ("repetition_penalty", &["1"]),
    ("samplers", &[]),
    ("sampling_params", &[]),
    ("smoothing_factor", &["0"]),
    ("tfs_z", &["1"]),
    ("top_a", &["0"]),
    ("top_k", &["0", "-1"]),
    ("top_n_sigma", &["-1", "0"]),
    ("typical", &["1"]),
    ("typical_p", &["1"]),
    ("vllm_xargs", &["{}"]),
    ("watermark", &["false"]),
    ("xtc_probability", &["0"]),
    // A form that the answer must have.
    ("ebnf", &[]),
    ("format", &[]),
    ("grammar", &["\"\""]),
    ("guided_choice", &[]),
    ("guided_grammar", &[]),
    ("guided_json", &[]),
    ("guided_regex", &[]),
    ("json_schema", &[]),
    ("regex", &[]),
    ("structural_tag", &[]),
    ("structured_outputs", &[]),
    // How other searches choose a text.
    ("do_sample", &["true"]),
    ("length_penalty", &["1"]),
    ("num_beams", &["1"]),
    ("use_beam_search", &["false"]),
    // Where it ends.
    ("include_stop_str_in_output", &["false"]),
    ("max_new_tokens", &[]),
    ("min_new_tokens", &["0"]),
    ("min_tokens", &["0"]),
    ("n_indent", &["0"]),
    ("n_predict", &[]),
    ("no_stop_trim", &["false"]),
    ("num_predict", &[]),
    ("repetition_detection", &[]),
    ("stop_regex", &["[]"]),
    ("stop_sequences", &["[]"]),
    ("stop_token_ids", &["[]"]),
    ("t_max_predict_ms", &["0", "-1"]),
    ("thinking_token_budget", &[]),
    // Another prompt, or another model.
    ("add_generation_prompt", &["true"]),
    ("add_special_tokens", &["true"]),
    ("chat_template", &[]),
    ("chat_template_kwargs", &["{}"]),
    ("context", &[]),
    ("continue_final_message", &["false"]),
    ("documents", &["[]"]),
    ("enable_thinking", &[]),
    ("image_data", &["[]"]),
    ("images", &["[]"]),
    ("input_extra", &["[]"]),
    ("input_ids", &[]),
    ("input_prefix", &["\"\""]),
    ("input_suffix", &["\"\""]),
    ("lora", &["[]"]),
    ("lora_path", &[]),
    ("mm_processor_kwargs", &["{}"]),
    ("multimodal_data", &["[]"]),
    ("options", &["{}"]),
    ("prompt_embeds", &[]),
    ("raw", &["false"]),
    ("safe_prompt", &["false"]),
    ("session_params", &[]),
    ("system", &["\"\""]),
    ("template", &["\"\""]),
    ("thinking", &[]),
    ("truncate", &[]),
    ("truncate_prompt_tokens", &[]),
    // More in the answer, or another spelling of it.
    ("decoder_input_details", &["false"]),
    ("details", &["false"]),
    ("detokenize", &["true"]),
    ("n_probs", &["0"]),
    ("prompt_logprobs", &[]),
    ("reasoning_format", &["\"none\""]),
    ("response_fields", &["[]"]),
    ("return_full_text", &["false"]),
    ("return_hidden_states", &["false"]),
    ("return_logprob", &["false"]),
    ("return_token_ids", &["false"]),
    ("return_tokens", &["false"]),
    ("return_tokens_as_token_ids", &["false"]),
    ("top_n_tokens", &["0"]),
    // Seeds by another name.
    ("random_seed", &[]),
    ("sampling_seed", &[]),
];

/// Those of them that make another prompt, which matter where nothing is generated.
pub(super) const OF_PROMPTS: &[&str] = &[
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "context",
    "continue_final_message",
    "documents",
    "enable_thinking",
    "functions",
    "image_data",
    "images",
    "input_extra",
    "input_ids",
    "input_prefix",
    "input_suffix",
    "mm_processor_kwargs",
    "multimodal_data",
    "prompt_embeds",
    "reasoning_effort",
    "suffix",
    "system",
    "template",
    "thinking",
    "tools",
    "truncate",
    "truncate_prompt_tokens",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_is_there_once_with_values_that_are_json() {
        for (at, (name, nothing)) in UNSUPPORTED.iter().enumerate() {
            assert!(UNSUPPORTED.iter().skip(at + 1).all(|(other, _)| other != name), "{name}");
            for value in *nothing {
                assert!(serde_json::from_str::<serde_json::Value>(value).is_ok(), "{name}");
            }
        }
        for name in OF_PROMPTS {
            assert!(UNSUPPORTED.iter().any(|(other, _)| other == name), "{name}");
        }
    }
}
