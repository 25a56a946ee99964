//! The models and sizes that are compared.
use std::fmt;

use kv::KvFormat;
use kv::quant::{ScaleGroup, Scaling};
use serde::Serialize;

/// A decoder as candle-transformers' Llama has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) mlp: usize,
    /// Rows of the embedding, which is the last projection too.
    pub(crate) vocabulary: usize,
}

/// SmolLM2-135M.
pub(crate) const SMOLLM2: Shape = Shape {
    name: "smollm2",
    hidden: 576,
    layers: 30,
    q_heads: 9,
    kv_heads: 3,
    head_dim: 64,
    mlp: 1536,
    vocabulary: 49_152,
};

/// Two of the 28 layers of Qwen3-0.6B, and as much of its vocabulary: all of them, with 16 sequences
/// of 16,384 tokens, would take 60 GB in candle's cache alone.
pub(crate) const WIDE: Shape = Shape {
    name: "wide",
    hidden: 1024,
    layers: 2,
    q_heads: 16,
    kv_heads: 8,
    head_dim: 128,
    mlp: 3072,
    vocabulary: 10_852,
};

/// Formats of our cache.
const FORMATS: [KvFormat; 4] =
    [KvFormat::F32, KvFormat::Bf16, KvFormat::Int8(Scaling::Row), KvFormat::L4(ScaleGroup::Row)];

/// A decode step of a batch in which all sequences have the same length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) shape: Shape,
    pub(crate) batch: usize,
    /// Cached tokens of each sequence before the step.
    pub(crate) context: usize,
    /// Formats of our cache.
    pub(crate) formats: Vec<KvFormat>,
}

impl Case {
    /// Returns the bytes of one layer's K and V in candle's cache.
    pub(crate) fn layer_bytes(&self) -> u64 {
        let Shape { kv_heads, head_dim, .. } = self.shape;
        let values = 2 * self.batch * self.context * kv_heads * head_dim;
        u64::try_from(values * size_of::<f32>()).unwrap_or(u64::MAX)
    }

    /// Returns the bytes that candle needs: its cache and, of one layer, the copy of K and V that
    /// is made for attention, with as many heads as q has.
    pub(crate) fn candle_bytes(&self) -> u64 {
        let Shape { layers, q_heads, kv_heads, .. } = self.shape;
        let layer = self.layer_bytes();
        let copies = u64::try_from(layers + q_heads / kv_heads).unwrap_or(u64::MAX);
        layer.saturating_mul(copies)
    }

    /// Names the case with a format.
    pub(crate) fn name(&self, format: KvFormat) -> String {
        format!("{self}/{format}")
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/b{}/c{}", self.shape.name, self.batch, self.context)
    }
}

/// Returns the cases of a cross through 16 sequences of 4,096 tokens, or of the full grid, with the
/// formats whose names contain all filters.
pub(crate) fn cases(is_full: bool, filters: &[String]) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in [SMOLLM2, WIDE] {
        for batch in [1, 4, 16] {
            for context in [512, 4096, 16_384] {
                if !is_full && batch != 16 && context != 4096 {
                    continue;
                }
                let mut case = Case { shape, batch, context, formats: Vec::new() };
                let matches = |format: &KvFormat| {
                    let name = case.name(*format);
                    filters.iter().all(|filter| name.contains(filter))
                };
                case.formats = FORMATS.into_iter().filter(matches).collect();
                if !case.formats.is_empty() {
                    cases.push(case);
                }
            }
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_choose_cases_and_formats() {
        let (cross, full) = (cases(false, &[]), cases(true, &[]));
        assert_eq!((cross.len(), full.len()), (10, 18));
        assert!(cross.iter().all(|case| full.contains(case)));
        let filters = ["wide/b16", "c4096", "bf16"].map(str::to_owned);
        let [case] = &cases(false, &filters)[..] else { panic!("one case") };
        assert_eq!(case.name(case.formats[0]), "wide/b16/c4096/bf16");
        assert_eq!(case.formats.len(), 1);
        assert!(cases(true, &["b2".to_owned()]).is_empty());
    }

    #[test]
    fn candle_holds_its_cache_and_a_copy_of_one_layer() {
        let case = Case { shape: SMOLLM2, batch: 16, context: 4096, formats: Vec::new() };
        assert_eq!(case.layer_bytes(), 2 * 16 * 4096 * 3 * 64 * 4);
        assert_eq!(case.candle_bytes(), 33 * case.layer_bytes());
    }
}
