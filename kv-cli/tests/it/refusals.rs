//! Bad input: one line, the right exit code, never a panic.
use std::fs;

use serde_json::json;

use crate::support::{ModelDir, command, entries, fails, kv, safetensors};

fn generate<'a>(model: &'a ModelDir, extra: &[&'a str]) -> Vec<&'a str> {
    [&["generate", "--json", "--model", model.path()], extra].concat()
}

#[test]
fn wrong_usage_is_2() {
    for (args, words) in [
        (&["frobnicate"][..], "frobnicate"),
        (&["generate", "--frobnicate"], "--frobnicate"),
        (&["generate", "--backend", "abacus"], "expected one of cpu, wgpu, cuda"),
        (&["generate", "--backend", "cpu:7"], "cpu:7"),
        (&["generate", "--format", "int7"], "expected one of f32, f16, bf16"),
        (&["generate", "--paged", "16"], "expected BLOCK_SIZE,NUM_BLOCKS"),
        (&["generate", "--paged", "0,16"], "at least 1"),
        (&["generate", "--paged", "16,-1"], "blocks"),
        (&["generate", "--paged", "16,99999999999"], "too large"),
        (&["generate", "--paged", "16,16", "--contiguous"], "cannot be used with"),
        (&["generate", "--compare", "--no-cache"], "cannot be used with"),
        (&["generate", "--temperature", "-1"], "at least 0"),
        (&["generate", "--temperature", "NaN"], "finite"),
        (&["generate", "--temperature", "inf"], "finite"),
        (&["generate", "--temperature", "hot"], "invalid float"),
        (&["generate", "--max-new-tokens", "0"], "at least 1"),
        (&["generate", "--max-batch", "0"], "at least 1"),
        (&["generate", "--max-step-tokens", "x"], "invalid digit"),
        (&["generate", "--seed", "-1"], "--seed"),
        (&["generate", "--model"], "a value is required"),
        (&["tier", "rm", "cache"], "required"),
        (&["tier", "rm", "cache", "--all", "--older-than", "1d"], "cannot be used with"),
        (&["tier", "rm", "cache", "--older-than", "7"], "30d"),
        (&["tier", "ls", "cache", "--root", "01"], "16 to 64"),
        (&["tier", "ls", "rediss://host"], "TLS"),
        (&["tier", "ls", "host=2GiB"], "host memory"),
        (&["tier", "ls", "gs://bucket"], "redis, valkey and s3"),
    ] {
        fails(args, 2, words);
    }
    let nothing = kv(&[]);
    assert_eq!((nothing.code, nothing.stdout.as_str()), (2, ""));
    assert!(nothing.stderr.contains("Usage: kv"), "{}", nothing.stderr);
}

#[test]
fn help_has_examples_and_is_0() {
    for args in [&["generate", "--help"][..], &["plan", "--help"], &["devices", "--help"]] {
        let output = kv(args);
        assert_eq!((output.code, output.stderr.as_str()), (0, ""));
        assert!(output.stdout.contains("Examples:\n  kv "), "{}", output.stdout);
    }
    assert_eq!(kv(&["--help"]).code, 0);
    assert!(kv(&["--version"]).stdout.starts_with("kv "));
}

#[test]
fn a_missing_adapter_is_named() {
    for name in ["wgpu:4000", "wgpu:no such card"] {
        fails(&["generate", "--backend", name], 1, "no adapter");
    }
    fails(&["generate", "--backend", "wgpu:"], 2, "NAME:INDEX");
}

#[test]
fn a_missing_card_is_named() {
    // No machine has that many cards.
    fails(&["generate", "--backend", "cuda:4000"], 1, "open cuda");
}

#[test]
fn a_missing_model_is_named() {
    fails(&["generate", "--model", "/no/such/model"], 1, "/no/such/model: no such file");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        let model = ModelDir::copy();
        fs::remove_file(model.file(file)).expect(file);
        fails(&generate(&model, &[]), 1, file);
    }
    fails(&["generate", "--prompts", "/no/such/prompts"], 1, "/no/such/prompts");
}

#[test]
fn an_invalid_configuration_is_refused() {
    for (field, value, words) in [
        ("num_attention_heads", Some(json!(0)), "num_attention_heads is 0"),
        ("num_key_value_heads", Some(json!(0)), "num_key_value_heads is 0"),
        ("num_key_value_heads", Some(json!(3)), "is not a multiple of num_key_value_heads 3"),
        ("hidden_size", None, "hidden_size is missing"),
        ("hidden_size", Some(json!(-64)), "invalid value"),
        ("hidden_size", Some(json!(60)), "expected [512, 60]"),
        ("num_hidden_layers", Some(json!(6)), "model.layers.5.input_layernorm.weight is missing"),
        ("num_hidden_layers", Some(json!(100_000)), "at most 65535"),
        ("vocab_size", Some(json!(500)), "expected [500, 64]"),
        ("head_dim", Some(json!(7)), "7 is not a multiple"),
        ("head_dim", Some(json!(16)), "expected [128, 64]"),
        ("rope_scaling", Some(json!({"type": "ntk"})), "\"ntk\" is not supported"),
        ("rope_theta", Some(json!(0.0)), "rope_theta is 0"),
        ("model_type", Some(json!("gpt2")), "\"gpt2\" is not supported"),
        ("tie_word_embeddings", Some(json!(false)), "lm_head.weight is missing"),
        ("attention_bias", Some(json!(true)), "self_attn.q_proj.bias is missing"),
        ("max_position_embeddings", Some(json!(3)), "leaves no room in a context of 3"),
    ] {
        let model = ModelDir::copy();
        model.set(field, value);
        fails(&generate(&model, &[]), 1, words);
    }
    for text in ["", "{", "[]", "{}", "\u{0}", "{\"hidden_size\": \"64\"}"] {
        let model = ModelDir::copy();
        model.write("config.json", text);
        fails(&generate(&model, &[]), 1, "config.json: ");
    }
}

#[test]
fn inconsistent_weights_are_refused() {
    let model = ModelDir::copy();
    let good = fs::read(model.file("model.safetensors")).expect("weights");
    let refused = |bytes: &[u8], words: &str| {
        model.write("model.safetensors", bytes);
        fails(&generate(&model, &[]), 1, words);
    };
    for length in [0, 7, 8, 100, good.len() / 2, good.len() - 1] {
        refused(&good[..length], "model.safetensors: ");
    }
    refused(&[&good[..], &[0; 4]].concat(), "model.safetensors: ");
    for header in [0, u64::MAX, 1 << 40, 1] {
        refused(&[&header.to_le_bytes(), &good[8..]].concat(), "model.safetensors: ");
    }
    let text = String::from_utf8_lossy(&good[8..]).into_owned();
    let edited = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let at = text.find(from).expect(from) + 8;
        let mut bytes = good.clone();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        bytes
    };
    refused(&edited("\"shape\":[512,64]", "\"shape\":[512,65]"), "model.safetensors: ");
    refused(&edited("\"data_offsets\":[0,", "\"data_offsets\":[9,"), "model.safetensors: ");
    refused(&edited("F32", "I32"), "element type I32, expected f32, f16 or bf16");
    refused(&edited("embed_tokens", "embed_tokenz"), "model.embed_tokens.weight is missing");
    let mut tensors = entries();
    let embedding = tensors.iter_mut().find(|entry| entry.name == "model.embed_tokens.weight");
    embedding.expect("an embedding").shape = vec![64, 512];
    refused(&safetensors(&tensors), "has shape [64, 512], expected [512, 64]");
    let mut tensors = entries();
    for entry in &mut tensors {
        entry.bytes.fill(0xFF);
    }
    refused(&safetensors(&tensors), "not a number");
}

#[test]
fn an_index_with_invalid_paths_is_refused() {
    let model = ModelDir::copy();
    fs::remove_file(model.file("model.safetensors")).expect("weights");
    for (index, words) in [
        ("{}", "weight_map"),
        ("{\"weight_map\": {\"a\": \"../../etc/passwd\"}}", "is not a plain file name"),
        ("{\"weight_map\": {\"a\": \"/etc/passwd\"}}", "is not a plain file name"),
        ("{\"weight_map\": {\"a\": \"..\"}}", "is not a plain file name"),
        ("{\"weight_map\": {\"a\": \"part-1.safetensors\"}}", "part-1.safetensors"),
        ("{\"weight_map\": {}}", "model.embed_tokens.weight is missing"),
    ] {
        model.write("model.safetensors.index.json", index);
        fails(&generate(&model, &[]), 1, words);
    }
}

#[test]
fn a_tokenizer_that_does_not_fit_is_refused() {
    for text in ["", "{}", "[1]", "{\"version\": \"1.0\", \"model\": {}}"] {
        let model = ModelDir::copy();
        model.write("tokenizer.json", text);
        fails(&generate(&model, &[]), 1, "tokenizer.json: not a tokenizer.json");
    }
    let model = ModelDir::copy();
    let good = fs::read_to_string(model.file("tokenizer.json")).expect("tokenizer.json");
    model.write("tokenizer.json", good.replacen("\"Fuse\"", "\"Fuse\", 9", 1));
    fails(&generate(&model, &[]), 1, "tokenizer.json: not a tokenizer.json");
    // Its tokens exceed a vocabulary that was cut.
    let model = ModelDir::copy();
    model.set("vocab_size", Some(json!(300)));
    let mut tensors = entries();
    let embedding = tensors.iter_mut().find(|entry| entry.name == "model.embed_tokens.weight");
    let embedding = embedding.expect("an embedding");
    embedding.shape = vec![300, 64];
    embedding.bytes.truncate(300 * 64 * 4);
    model.write("model.safetensors", safetensors(&tensors));
    fails(&generate(&model, &[]), 1, "the model knows 300");
    let stdin = fs::read(model.file("config.json")).expect("config.json");
    model.write("not-utf8.txt", [&stdin[..], &[0xFF, 0xFE]].concat());
    let file = model.file("not-utf8.txt");
    let file = file.to_str().expect("UTF-8");
    fails(&["generate", "--prompts", file], 1, "not-utf8.txt: ");
}

#[test]
fn a_file_of_utf_16_is_named_as_such() {
    let model = ModelDir::copy();
    let utf16 = |text: &str| -> Vec<u8> {
        let units = std::iter::once(0xFEFF).chain(text.encode_utf16());
        units.flat_map(u16::to_le_bytes).collect()
    };
    model.write("prompts.txt", utf16("Once upon a time\n"));
    let file = model.file("prompts.txt");
    let file = file.to_str().expect("UTF-8");
    let words = "prompts.txt: the file is UTF-16 by its byte order mark, expected UTF-8";
    fails(&["generate", "--prompts", file], 1, words);
    fails(&["eval", "--text", file], 1, words);
}

#[test]
fn numbers_of_threads_have_a_bound() {
    for (name, args) in [
        ("KV_CPU_THREADS", &["generate", "--max-new-tokens", "1"][..]),
        ("RAYON_NUM_THREADS", &["generate", "--max-new-tokens", "1"]),
        ("RAYON_NUM_THREADS", &["plan"]),
    ] {
        for number in ["100000", "4097", "18446744073709551616"] {
            let output = command(args).env(name, number).output().expect("the program starts");
            let stderr = String::from_utf8(output.stderr).expect("UTF-8");
            assert_eq!(output.status.code(), Some(1), "{name}={number}: {stderr}");
            assert_eq!(stderr.lines().count(), 1, "{stderr}");
            assert!(stderr.contains(name) && stderr.contains("at most 4096"), "{stderr}");
        }
    }
    let bench = ["bench", "--suite", "decode", "--threads", "100000", "--context", "16"];
    fails(&bench, 1, "100000 threads given, at most 4096 are possible");
}

#[test]
fn a_prompt_that_can_never_fit_is_refused_up_front() {
    let long = "Once upon a time ".repeat(200);
    let output = ["generate", "--json", "--prompt", &long];
    fails(&output, 1, "leaves no room in a context of 512");
    let tiny = ["generate", "--json", "--paged", "4,3", "--prompt", "Once upon a time"];
    fails(&tiny, 1, "needs 33 blocks, the cache has 3");
    // The text of a streamed prompt is not printed before the prompt is accepted.
    let shown = ["generate", "--prompt", "Once", "--paged", "4,2", "--max-new-tokens", "99"];
    fails(&shown, 1, "blocks, the cache has 2");
    let fits = ["generate", "--json", "--paged", "4,33", "--prompt", "Once upon a time"];
    assert_eq!(kv(&fits).code, 0);
    fails(&["generate", "--json", "--paged", "4294967295,4294967295"], 1, "overflow");
}

/// Blocks of terabytes, which no step would ever have filled here.
#[cfg(target_os = "linux")]
#[test]
fn a_cache_larger_than_memory_is_refused_with_both_numbers() {
    for more in [["--paged", "16,100000000"], ["--paged", "1000000,4000"], ["--tier", "host=4TiB"]]
    {
        for words in ["GiB needed, ", "available: ", "KV_CPU_OVERCOMMIT=1"] {
            fails(&[&["generate", "--json"], &more[..]].concat(), 1, words);
        }
    }
    let generate = ["generate", "--json", "--max-new-tokens", "1"];
    let output = command(&generate).env("KV_CPU_OVERCOMMIT", "yes").output().expect("it starts");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("0 and 1 are possible"), "{stderr}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_a_failure() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
    let output = command(&["plan"]).stdout(full).output().expect("the program starts");
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(stderr.starts_with("kv: standard output: ") && stderr.lines().count() == 1, "{stderr}");
}
