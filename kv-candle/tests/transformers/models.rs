//! A small model with random weights, as candle-transformers has it and as the example has it.
use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models as candle;
use kv_candle::CandleStep;
use kv_candle::kv::CacheSpec;
use kv_candle::kv::spec::CacheSpecBuilder;
use serde_json::{Value, json};

use crate::exact::Exact;
use crate::llama::model as llama;
use crate::run::Logits;

/// That of the bundled tokenizer.
pub(crate) const VOCAB: u32 = 512;
const LAYERS: u16 = 3;
const HEAD_DIM: u32 = 8;

/// The example: ids `[1, t]` to logits `[b, vocab]`.
type Ours = Box<dyn Fn(&Tensor, &CandleStep<'_>) -> Result<Tensor>>;
/// A model of candle-transformers: ids `[1, t]` after a number of others, to logits of the last.
pub(crate) type Theirs = Box<dyn FnMut(&Tensor, usize) -> Result<Tensor>>;

/// A model that computes the logits of every token of a text.
type Whole = Box<dyn Fn(&[u32]) -> Vec<Logits>>;

/// The model, twice.
pub(crate) struct Model {
    /// Its `config.json`, and its weights.
    pub(crate) config: Value,
    pub(crate) tensors: HashMap<String, Tensor>,
    /// Geometry of the cache, without format and size.
    pub(crate) spec: CacheSpecBuilder,
    pub(crate) ours: Ours,
    /// Makes candle's model, without tokens.
    pub(crate) theirs: Box<dyn Fn() -> Theirs>,
    /// Computes the logits of every token of a text in f64.
    pub(crate) exact: Whole,
}

/// Makes the model.
pub(crate) fn llama() -> Model {
    let config = config();
    let parsed: candle::llama::LlamaConfig = serde_json::from_value(config.clone()).unwrap();
    let theirs = parsed.into_config(false);
    let tensors = tensors(|vb| candle::llama::Llama::load(vb, &theirs).map(drop));
    let model = llama::Llama::load(view(&tensors, DType::F32), &theirs).unwrap();
    let exact = Exact::new(&tensors, LAYERS);
    Model {
        config,
        tensors: tensors.clone(),
        spec: spec(),
        ours: Box::new(move |ids, step| model.forward(ids, step)),
        theirs: Box::new(move || {
            let model = candle::llama::Llama::load(view(&tensors, DType::F32), &theirs).unwrap();
            let cache = candle::llama::Cache::new(true, DType::F32, &theirs, &Device::Cpu);
            let mut cache = cache.unwrap();
            Box::new(move |ids, offset| model.forward(ids, offset, &mut cache))
        }),
        exact: Box::new(move |text| exact.logits(text)),
    }
}

fn spec() -> CacheSpecBuilder {
    CacheSpec::builder().layers(LAYERS).kv_heads(2).head_dim(HEAD_DIM)
}

/// Returns the `config.json` of the model.
fn config() -> Value {
    json!({
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": false,
        "attention_bias": false,
    })
}

fn view(tensors: &HashMap<String, Tensor>, dtype: DType) -> VarBuilder<'static> {
    VarBuilder::from_tensors(tensors.clone(), dtype, &Device::Cpu)
}

/// Returns values for all tensors that a model asks for. Outputs of projections have the size of
/// their inputs, but queries and keys are larger, so that softmax prefers few tokens.
fn tensors(load: impl Fn(VarBuilder<'_>) -> Result<()>) -> HashMap<String, Tensor> {
    let asked = VarMap::new();
    load(VarBuilder::from_varmap(&asked, DType::F32, &Device::Cpu)).unwrap();
    let asked = asked.data().lock().unwrap();
    let value = |(name, var): (&String, &candle_core::Var)| {
        let inputs = f64::from(u32::try_from(*var.dims().last().unwrap()).unwrap());
        let (mean, spread) = match name.as_str() {
            name if name.contains("norm") => (1.0, 0.2),
            name if name.contains("embed_tokens") => (0.0, 1.0),
            name if ["q_proj", "k_proj"].iter().any(|part| name.contains(part)) => {
                (0.0, 1.5 / inputs.sqrt())
            }
            _ => (0.0, 1.0 / inputs.sqrt()),
        };
        let seed = name.bytes().fold(7, |seed, byte| mixed(seed ^ u64::from(byte)));
        let count = u64::try_from(var.elem_count()).unwrap();
        // Uniform numbers with mean 0 and variance 1.
        let unit = |at: u64| {
            let bits = u32::try_from(mixed(seed.wrapping_add(at)) >> 32).unwrap();
            (f64::from(bits) / f64::from(1_u32 << 31) - 1.0) * 3.0_f64.sqrt()
        };
        let values: Vec<_> = (0..count).map(|at| mean + spread * unit(at)).collect();
        let tensor = Tensor::from_vec(values, var.shape(), &Device::Cpu).unwrap();
        (name.clone(), tensor.to_dtype(DType::F32).unwrap())
    };
    asked.iter().map(value).collect()
}

/// Mixes bits (splitmix64).
pub(crate) fn mixed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Returns the tokens of a text.
pub(crate) fn text(seed: u64, tokens: usize) -> Vec<u32> {
    let token = |at: u64| u32::try_from(mixed(seed << 32 | at) % u64::from(VOCAB)).unwrap();
    (0..).map(token).take(tokens).collect()
}
