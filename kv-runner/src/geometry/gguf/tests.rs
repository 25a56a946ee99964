//! Geometries from metadata alone, valid and damaged.
use candle_core::quantized::gguf_file::{self, Value};

use super::*;
use crate::geometry::LayerGeometry;
use crate::gguf::Head;

/// Writes the head of a file of this architecture; its keys come without the prefix.
fn written(architecture: &str, keys: &[(&str, Value)]) -> Head {
    let name = Value::String(architecture.to_owned());
    let own: Vec<_> =
        keys.iter().map(|(key, value)| (format!("{architecture}.{key}"), value)).collect();
    let mut metadata = vec![("general.architecture", &name)];
    metadata.extend(own.iter().map(|(key, value)| (key.as_str(), *value)));
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    gguf_file::write(&mut file, &metadata, &[]).expect("written");
    Head::read(file.path()).expect("a head")
}

fn read(architecture: &str, keys: &[(&str, Value)]) -> Result<ModelGeometry, ConfigError> {
    super::read(&written(architecture, keys).metadata())
}

fn list(counts: &[u32]) -> Value {
    Value::Array(counts.iter().copied().map(Value::U32).collect())
}

/// Returns the number of values that all layers keep per token.
fn values(geometry: &ModelGeometry) -> u64 {
    let values = |kind: &LayerGeometry| {
        let dims = if kind.is_latent { kind.head_dim_k } else { kind.head_dim_k + kind.head_dim_v };
        u64::from(kind.kv_heads) * u64::from(dims)
    };
    geometry.layers.iter().map(values).sum()
}

#[test]
fn every_kind_of_file_gives_its_rows() {
    let n = Value::U32;
    let llama = [
        ("block_count", n(32)),
        ("embedding_length", n(4096)),
        ("attention.head_count", n(32)),
        ("attention.head_count_kv", n(8)),
        ("context_length", n(8192)),
    ];
    let geometry = read("llama", &llama).expect("llama");
    assert_eq!((values(&geometry), geometry.context), (32 * 2 * 8 * 128, Some(8192)));
    assert!(geometry.notes.is_empty(), "{:?}", geometry.notes);
    let gemma3 = [
        ("block_count", n(34)),
        ("attention.head_count", n(8)),
        ("attention.head_count_kv", n(4)),
        ("attention.key_length", n(256)),
        ("attention.value_length", n(256)),
        ("attention.sliding_window", n(1024)),
    ];
    let geometry = read("gemma3", &gemma3).expect("gemma3");
    let slides: Vec<_> = geometry.layers.iter().map(|layer| layer.window.is_some()).collect();
    assert_eq!(slides[..12], [true, true, true, true, true, false].repeat(2)[..]);
    assert_eq!(values(&geometry), 34 * 2 * 4 * 256);
    let deepseek = [
        ("block_count", n(61)),
        ("attention.head_count", n(128)),
        ("attention.head_count_kv", n(1)),
        ("attention.key_length", n(576)),
        ("attention.value_length", n(512)),
        ("attention.kv_lora_rank", n(512)),
        ("rope.dimension_count", n(64)),
    ];
    assert_eq!(values(&read("deepseek2", &deepseek).expect("deepseek2")), 61 * 576);
    // Heads per layer, 0 for a layer without attention.
    let jamba = [
        ("block_count", n(4)),
        ("embedding_length", n(4096)),
        ("attention.head_count", n(32)),
        ("attention.head_count_kv", list(&[0, 8, 0, 4])),
    ];
    let geometry = read("jamba", &jamba).expect("jamba");
    assert_eq!((values(&geometry), geometry.layers.len()), (2 * 128 * 12, 2));
    assert!(geometry.notes[0].starts_with("2 of 4 layers are state-space"));
}

/// Makes the bytes of a file's head with these counts.
fn head(keys: &[(&str, u32)]) -> Vec<u8> {
    let string = |text: &str| {
        let length = u64::try_from(text.len()).expect("short").to_le_bytes();
        [&length[..], text.as_bytes()].concat()
    };
    let mut bytes = [&b"GGUF"[..], &3_u32.to_le_bytes(), &0_u64.to_le_bytes()].concat();
    bytes.extend(u64::try_from(keys.len() + 1).expect("few").to_le_bytes());
    bytes.extend(string("general.architecture"));
    bytes.extend(8_u32.to_le_bytes());
    bytes.extend(string("llama"));
    for (key, count) in keys {
        bytes.extend(string(&format!("llama.{key}")));
        // An array of one count.
        bytes.extend([9_u32.to_le_bytes(), 4_u32.to_le_bytes()].as_flattened());
        bytes.extend(1_u64.to_le_bytes());
        bytes.extend(count.to_le_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes
}

#[test]
fn a_damaged_head_is_an_answer_or_a_refusal() {
    let dir = tempfile::TempDir::new().expect("a directory");
    let path = dir.path().join("model.gguf");
    let keys = [
        ("block_count", 1),
        ("embedding_length", 64),
        ("attention.head_count", 8),
        ("attention.head_count_kv", 4),
        ("context_length", 512),
    ];
    let good = head(&keys);
    let read_bytes = |bytes: &[u8]| {
        std::fs::write(&path, bytes).expect("a file");
        ModelGeometry::read_gguf(&path)
    };
    assert_eq!(values(&read_bytes(&good).expect("a geometry")), 2 * 4 * 8);
    let mut refused = 0;
    for at in 0..good.len() {
        for change in [0x01, 0x80, 0xFF] {
            let mut bytes = good.clone();
            bytes[at] ^= change;
            refused += u32::from(read_bytes(&bytes).is_err());
        }
        refused += u32::from(read_bytes(&good[..at]).is_err());
    }
    assert!(refused > 500, "{refused}");
}

#[test]
fn models_without_a_cache_and_invalid_ones_are_refused() {
    let n = Value::U32;
    for (architecture, keys, words) in [
        ("rwkv7", &[][..], "no attention"),
        ("mamba", &[("block_count", n(2))], "no layer of the model has attention"),
        (
            "mamba",
            &[("block_count", n(2)), ("ssm.conv_kernel", n(4))],
            "mamba.ssm.inner_size is missing",
        ),
        ("bert", &[], "an encoder"),
        ("llama", &[], "llama.block_count is missing"),
        ("llama", &[("block_count", n(0))], "llama.block_count is 0"),
        ("llama", &[("block_count", n(1))], "attention.head_count is missing"),
        (
            "llama",
            &[("block_count", n(1)), ("attention.head_count", n(3)), ("embedding_length", n(8))],
            "embedding_length 8 is not a multiple of attention.head_count 3",
        ),
        (
            "llama",
            &[("block_count", n(3)), ("attention.head_count", list(&[4, 4]))],
            "llama.attention.head_count has 2 entries for 3 layers",
        ),
        (
            "x",
            &[
                ("block_count", n(1)),
                ("attention.head_count", n(6)),
                ("attention.head_count_kv", n(4)),
            ],
            "head_count 6 is not a multiple of head_count_kv 4",
        ),
        ("", &[], "general.architecture is missing"),
    ] {
        let error = format!("{:#}", read(architecture, keys).expect_err(words));
        assert!(error.contains(words), "{architecture}: {error}");
    }
}

#[test]
fn states_are_read_from_every_kind_of_file() {
    let n = Value::U32;
    let heads = [
        ("block_count", n(8)),
        ("embedding_length", n(1024)),
        ("attention.head_count", n(8)),
        ("attention.head_count_kv", n(2)),
    ];
    let by_layer = |kv_heads: &[u32]| {
        let mut keys = heads.to_vec();
        keys[3].1 = list(kv_heads);
        keys
    };
    let ssm = [
        ("ssm.conv_kernel", n(4)),
        ("ssm.inner_size", n(2048)),
        ("ssm.state_size", n(64)),
        ("ssm.time_step_rank", n(32)),
        ("ssm.group_count", n(4)),
    ];
    let ring = [2, 0, 0, 2, 0, 0, 0, 0];
    let mlps = ("feed_forward_length", list(&[0, 96, 0, 0, 96, 0, 96, 0]));
    let kimi = [
        ("attention.kv_lora_rank", n(512)),
        ("rope.dimension_count", n(64)),
        ("kda.head_dim", n(128)),
    ];
    let of = |keys: &[(&'static str, Value)], more: &[&[(&'static str, Value)]]| {
        keys.iter().chain(more.iter().copied().flatten()).cloned().collect::<Vec<_>>()
    };
    let matrix = |window: &[u32], matrix: &[u32]| vec![window.to_vec(), matrix.to_vec()];
    for (architecture, keys, layers, parts) in [
        // Every fourth layer attends; the heads of values have 64 of 2048.
        ("qwen35", of(&heads, &[&ssm]), 6, matrix(&[2560, 3], &[32, 64, 64])),
        ("qwen3next", of(&heads, &[&ssm]), 6, matrix(&[2560, 3], &[32, 64, 64])),
        ("falcon-h1", of(&heads, &[&ssm]), 8, matrix(&[2560, 3], &[32, 64, 64])),
        ("granitehybrid", of(&by_layer(&ring), &[&ssm]), 6, matrix(&[2560, 3], &[32, 64, 64])),
        (
            "nemotron_h",
            of(&by_layer(&ring), &[&ssm, &[mlps]]),
            3,
            matrix(&[2560, 3], &[32, 64, 64]),
        ),
        ("jamba", of(&by_layer(&ring), &[&ssm]), 6, matrix(&[2048, 3], &[2048, 64])),
        ("mamba", of(&[("block_count", n(8))], &[&ssm]), 8, matrix(&[2048, 3], &[2048, 64])),
        ("mamba2", of(&[("block_count", n(8))], &[&ssm]), 8, matrix(&[2560, 3], &[32, 64, 64])),
        (
            "kimi-linear",
            of(&by_layer(&ring), &[&ssm, &kimi]),
            6,
            matrix(&[3072, 3], &[8, 128, 128]),
        ),
        ("lfm2", of(&by_layer(&ring), &[&[("shortconv.l_cache", n(3))]]), 6, vec![vec![1024, 2]]),
    ] {
        let geometry = read(architecture, &keys).expect(architecture);
        let kinds = geometry.state_kinds();
        assert_eq!(kinds.len(), 1, "{architecture}");
        let (found, of) = &kinds[0];
        assert_eq!(found.iter().map(|part| part.shape.clone()).collect::<Vec<_>>(), parts);
        assert_eq!(of.len(), layers, "{architecture}");
        let is_counted = |note: &String| !note.contains("not counted");
        assert!(geometry.notes.iter().all(is_counted), "{architecture}: {:?}", geometry.notes);
    }
}

#[test]
fn the_layers_of_hybrid_models_are_listed_or_periodic() {
    let n = Value::U32;
    let base = [
        ("block_count", n(6)),
        ("embedding_length", n(64)),
        ("attention.head_count", n(4)),
        ("attention.head_count_kv", n(2)),
        ("ssm.conv_kernel", n(4)),
        ("ssm.inner_size", n(32)),
        ("ssm.state_size", n(8)),
        ("ssm.time_step_rank", n(4)),
        ("ssm.group_count", n(2)),
    ];
    let recurrent = ("attention.recurrent_layers", list(&[0, 1, 1, 0, 1, 0]));
    for (more, attending, notes) in [
        (vec![], &[3][..], 0),
        (vec![("full_attention_interval", n(2))], &[1, 3, 5], 0),
        (vec![recurrent.clone()], &[0, 3, 5], 0),
        // A list takes precedence.
        (vec![recurrent.clone(), ("full_attention_interval", n(2))], &[0, 3, 5], 0),
        (vec![recurrent, ("nextn_predict_layers", n(2))], &[0, 3], 1),
        (vec![("full_attention_interval", n(2)), ("nextn_predict_layers", n(1))], &[1, 3], 1),
        (vec![("nextn_predict_layers", n(0))], &[3], 0),
    ] {
        let geometry = read("qwen35", &[&base[..], &more].concat()).expect("a geometry");
        assert_eq!(geometry.layer_indices, attending, "{more:?}");
        let states = geometry.states.iter().map(|states| states.layer);
        let others = (0..geometry.num_layers).filter(|layer| !attending.contains(layer));
        assert!(states.eq(others), "{more:?}");
        assert_eq!(geometry.notes.len(), notes, "{more:?}: {:?}", geometry.notes);
    }
    let more = [("nextn_predict_layers", n(2))];
    let geometry = read("qwen35moe", &[&base[..], &more].concat()).expect("a geometry");
    assert_eq!(geometry.num_layers, 4);
    assert_eq!(
        geometry.notes,
        ["the last 2 of 6 layers predict tokens further ahead: not counted"]
    );
    // Other architectures have no such layers of linear attention.
    let all = read("qwen3", &[&base[..4], &more].concat()).expect("a geometry");
    assert_eq!(all.layer_indices, [0, 1, 2, 3, 4, 5]);
}
