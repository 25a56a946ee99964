//! Tiny models with outputs recorded from transformers, see `kv-runner/tests/data/make_models.py`.
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::Value;

/// The recording of one model.
pub(crate) struct Recorded {
    pub(crate) name: String,
    pub(crate) config: Value,
    /// Shapes of its tensors.
    pub(crate) tensors: BTreeMap<String, Vec<usize>>,
    /// Whether norms are kept less one, except those of a delta rule.
    norms_less_one: bool,
    pub(crate) prompt: String,
    pub(crate) prompt_ids: Vec<u32>,
    /// Greedy continuation of the prompt.
    pub(crate) output_ids: Vec<u32>,
    /// Entries of the vocabulary whose logits are recorded, and these logits after every token.
    pub(crate) kept: Vec<usize>,
    pub(crate) logits: Vec<Vec<f64>>,
}

/// Reads all recordings, sorted by name.
pub(crate) fn recorded() -> Vec<Recorded> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kv-runner/tests/data/models");
    let entries = fs::read_dir(&dir).expect("recorded models");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    assert!(paths.len() > 20, "{} models", paths.len());
    let read = |path: &std::path::PathBuf| {
        let text = fs::read_to_string(path).expect("a recorded model");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        let field = |name: &str| value.get(name).expect("a field").clone();
        let case = Recorded {
            name: path.file_stem().expect("a name").to_string_lossy().into_owned(),
            config: field("config"),
            tensors: of(field("tensors")),
            norms_less_one: value.get("norms_less_one") == Some(&Value::Bool(true)),
            prompt: of(field("prompt")),
            prompt_ids: of(field("prompt_ids")),
            output_ids: of(field("output_ids")),
            kept: of(field("kept")),
            logits: of(field("logits")),
        };
        let text = [case.prompt_ids.as_slice(), &case.output_ids].concat();
        assert_eq!(case.logits.len(), text.len(), "{}", case.name);
        assert!(case.logits.iter().all(|row| row.len() == case.kept.len()), "{}", case.name);
        assert!(!case.prompt.is_empty() && !case.config.is_null(), "{}", case.name);
        case
    };
    paths.iter().map(read).collect()
}

impl Recorded {
    /// Makes the values of all tensors, with their names and shapes.
    pub(crate) fn weights(&self) -> impl Iterator<Item = (&str, &[usize], Vec<f32>)> {
        self.tensors.iter().map(|(name, shape)| {
            let is_norm = name.ends_with("norm.weight") && !name.ends_with("attn.norm.weight");
            let less = if is_norm && self.norms_less_one { 1.0 } else { 0.0 };
            (name.as_str(), shape.as_slice(), values_less(name, shape, less))
        })
    }
}

fn of<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("its type")
}

/// Makes the values of one tensor: a hash of its name and of the index, scaled by the kind of
/// tensor, less a number.
fn values_less(name: &str, shape: &[usize], less: f64) -> Vec<f32> {
    let start = name.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    });
    let inputs = u32::try_from(*shape.last().expect("an extent")).expect("small");
    let gain = if name.contains("lm_head") { 3.0 } else { 1.5 };
    let value = |index: u64| {
        let mut x = index.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(start);
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
        let bits = u32::try_from(x >> 40).expect("24 bits");
        let unit = f64::from(bits) / f64::from(1 << 23) - 1.0;
        if name.ends_with("norm.weight") {
            1.0 + 0.25 * unit - less
        } else if name.rsplit_once('.').is_some_and(|(_, part)| part == "bias") {
            0.25 * unit
        } else if name.contains("embed_tokens") {
            unit
        } else {
            gain * (3.0 / f64::from(inputs)).sqrt() * unit
        }
    };
    let count = shape.iter().product::<usize>();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::as_conversions,
        reason = "rounding is meant"
    )]
    (0..u64::try_from(count).expect("small")).map(|index| value(index) as f32).collect()
}
