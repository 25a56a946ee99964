//! Small models with random weights, each as candle-transformers has it and as a port.
use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder, VarMap};
use candle_transformers::models as candle;
use kv_candle::CandleStep;
use kv_candle::kv::CacheSpec;
use kv_candle::kv::spec::CacheSpecBuilder;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::exact::Exact;
use crate::run::{Logits, as_candle};
use crate::{gemma3::model as gemma3, llama::model as llama, mistral::model as mistral};
use crate::{phi3::model as phi3, qwen2, qwen3::model as qwen3};

/// That of the bundled tokenizer.
pub(crate) const VOCAB: u32 = 512;
const LAYERS: u16 = 3;
const HEAD_DIM: u32 = 8;

/// A port: ids `[1, t]` to logits `[b, vocab]`.
type Ours = Box<dyn Fn(&Tensor, &CandleStep<'_>) -> Result<Tensor>>;
/// A model of candle-transformers: ids `[1, t]` after a number of others, to logits of the last.
pub(crate) type Theirs = Box<dyn FnMut(&Tensor, usize) -> Result<Tensor>>;

/// A model that computes the logits of every token of a text.
type Whole = Box<dyn Fn(&[u32]) -> Vec<Logits>>;

/// One model, twice.
pub(crate) struct Model {
    pub(crate) name: &'static str,
    /// Its `config.json`, and its weights.
    pub(crate) config: Value,
    pub(crate) tensors: HashMap<String, Tensor>,
    /// Geometry of the cache, without format and size.
    pub(crate) spec: CacheSpecBuilder,
    /// Layers with a sliding window, and the tokens before its own that a query sees there.
    pub(crate) windowed: (&'static [u16], u32),
    pub(crate) ours: Ours,
    /// Makes candle's model, without tokens.
    pub(crate) theirs: Box<dyn Fn() -> Theirs>,
    /// Computes the logits of every token of a text in f64.
    pub(crate) exact: Whole,
}

/// Settings that tests change.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) positions: usize,
    /// Sliding window of mistral, phi3 and gemma3.
    pub(crate) window: Option<usize>,
}

/// Everything fits in one window.
pub(crate) const SHORT: Shape = Shape { positions: 256, window: None };

/// Returns all models.
pub(crate) fn all(shape: Shape) -> [Model; 6] {
    [
        llama_model(shape),
        qwen2_model(shape),
        qwen3_model(shape),
        phi3_model(shape),
        mistral_model(shape),
        gemma3_model(shape),
    ]
}

pub(crate) fn llama_model(shape: Shape) -> Model {
    let (config, ours, theirs): (Value, llama::LlamaConfig, candle::llama::LlamaConfig) =
        configs(shape, &json!({}));
    let (ours, theirs) = (ours.into_config(false), theirs.into_config(false));
    let tensors = tensors(|vb| candle::llama::Llama::load(vb, &theirs).map(drop));
    let model = llama::Llama::load(view(&tensors, DType::F32), &ours).unwrap();
    let rope = llama::Cache::new(DType::F32, &ours, &Device::Cpu).unwrap();
    let exact = Exact::new(&tensors, 8, None, LAYERS);
    Model {
        name: "llama",
        config,
        tensors: tensors.clone(),
        spec: spec(),
        windowed: (&[], 0),
        // `forward` is tested by the example.
        ours: Box::new(move |ids, step| model.forward_input_embed(&model.embed(ids)?, &rope, step)),
        theirs: Box::new(move || {
            let model = candle::llama::Llama::load(view(&tensors, DType::F32), &theirs).unwrap();
            let cache = candle::llama::Cache::new(true, DType::F32, &theirs, &Device::Cpu);
            let mut cache = cache.unwrap();
            Box::new(move |ids, offset| model.forward(ids, offset, &mut cache))
        }),
        exact: Box::new(move |text| exact.logits(text)),
    }
}

pub(crate) fn qwen2_model(shape: Shape) -> Model {
    let (config, ours, theirs): (Value, _, candle::qwen2::Config) = configs(shape, &json!({}));
    let tensors = tensors(|vb| candle::qwen2::ModelForCausalLM::new(&theirs, vb).map(drop));
    let model = qwen2::ModelForCausalLM::new(&ours, view(&tensors, DType::F32)).unwrap();
    let exact = Exact::new(&tensors, 8, None, LAYERS);
    Model {
        name: "qwen2",
        config,
        tensors: tensors.clone(),
        spec: spec(),
        windowed: (&[], 0),
        ours: Box::new(move |ids, step| model.forward(ids, step)),
        theirs: Box::new(move || {
            let vb = view(&tensors, DType::F32);
            let mut model = candle::qwen2::ModelForCausalLM::new(&theirs, vb).unwrap();
            Box::new(move |ids, offset| model.forward(ids, offset))
        }),
        exact: Box::new(move |text| exact.logits(text)),
    }
}

fn qwen3_model(shape: Shape) -> Model {
    let (config, ours, theirs): (Value, _, candle::qwen3::Config) =
        configs(shape, &json!({"attention_bias": true}));
    let tensors = tensors(|vb| candle::qwen3::ModelForCausalLM::new(&theirs, vb).map(drop));
    let model = qwen3::ModelForCausalLM::new(&ours, view(&tensors, DType::F32)).unwrap();
    let exact = Exact::new(&tensors, 8, None, LAYERS);
    Model {
        name: "qwen3",
        config,
        tensors: tensors.clone(),
        spec: spec(),
        windowed: (&[], 0),
        ours: Box::new(move |ids, step| model.forward(ids, step)),
        theirs: Box::new(move || {
            let vb = view(&tensors, DType::F32);
            let mut model = candle::qwen3::ModelForCausalLM::new(&theirs, vb).unwrap();
            Box::new(move |ids, offset| model.forward(ids, offset))
        }),
        exact: Box::new(move |text| exact.logits(text)),
    }
}

fn phi3_model(shape: Shape) -> Model {
    // A part of each head has no position.
    let (config, ours, theirs): (Value, _, candle::phi3::Config) =
        configs(shape, &json!({"partial_rotary_factor": 0.5, "sliding_window": shape.window}));
    let tensors = tensors(|vb| candle::phi3::Model::new(&theirs, vb).map(drop));
    let model = phi3::Model::new(&ours, view(&tensors, DType::F32)).unwrap();
    let exact = Exact::new(&tensors, 4, shape.window, LAYERS);
    Model {
        name: "phi3",
        config,
        tensors: tensors.clone(),
        spec: spec(),
        windowed: windowed(shape),
        ours: Box::new(move |ids, step| model.forward(ids, step)),
        theirs: Box::new(move || {
            let vb = view(&tensors, DType::F32);
            let mut model = candle::phi3::Model::new(&theirs, vb).unwrap();
            Box::new(move |ids, offset| model.forward(ids, offset))
        }),
        exact: Box::new(move |text| exact.logits(text)),
    }
}

pub(crate) fn mistral_model(shape: Shape) -> Model {
    let window = json!({"sliding_window": shape.window});
    let (config, ours, mut theirs): (Value, _, candle::mistral::Config) = configs(shape, &window);
    theirs.sliding_window = shape.window.map(|window| window - 1);
    let tensors = tensors(|vb| candle::mistral::Model::new(&theirs, vb).map(drop));
    let model = mistral::Model::new(&ours, view(&tensors, DType::F32)).unwrap();
    let exact = Exact::new(&tensors, 8, shape.window, LAYERS);
    Model {
        name: "mistral",
        config,
        tensors: tensors.clone(),
        spec: spec(),
        windowed: windowed(shape),
        // `forward` is tested by the example.
        ours: Box::new(move |ids, step| {
            model.forward_embeds(&model.embed_tokens().forward(ids)?, step)
        }),
        theirs: Box::new(move || {
            let vb = view(&tensors, DType::F32);
            let mut model = candle::mistral::Model::new(&theirs, vb).unwrap();
            Box::new(move |ids, offset| model.forward(ids, offset))
        }),
        exact: Box::new(move |text| exact.logits(text)),
    }
}

pub(crate) fn gemma3_model(shape: Shape) -> Model {
    let own = json!({
        "rope_local_base_freq": 100.0,
        "query_pre_attn_scalar": HEAD_DIM,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 9.0,
        "sliding_window": shape.window.unwrap_or(shape.positions),
        "sliding_window_pattern": 3,
        "attention_bias": true,
        "hidden_activation": "gelu_pytorch_tanh",
    });
    let (config, ours, theirs): (Value, gemma3::Config, candle::gemma3::Config) =
        configs(shape, &own);
    let tensors = tensors(|vb| candle::gemma3::Model::new(false, &theirs, vb).map(drop));
    let left = u32::try_from(theirs.sliding_window - 1).unwrap();
    let model = gemma3::Model::new(false, &ours, view(&tensors, DType::F32)).unwrap();
    let weights = tensors.clone();
    let of_candle = move |dtype| -> Theirs {
        let mut model = candle::gemma3::Model::new(false, &theirs, view(&weights, dtype)).unwrap();
        // Its cache refuses the V of two tokens or more, which is transposed.
        Box::new(move |ids, offset| {
            let tokens = ids.chunk(ids.dim(1)?, 1)?;
            let logits = (offset..).zip(tokens).map(|(at, token)| model.forward(&token, at));
            logits.reduce(|_, next| next).unwrap()
        })
    };
    let exact = of_candle.clone();
    Model {
        name: "gemma3",
        config,
        tensors,
        spec: spec(),
        windowed: (&[0, 1], left),
        ours: Box::new(move |ids, step| model.forward(ids, step)),
        theirs: Box::new(move || of_candle(DType::F32)),
        // Its norms are of its own and take f64.
        exact: Box::new(move |text| as_candle(exact(DType::F64), text, 1)),
    }
}

/// All layers, if there is a window.
fn windowed(shape: Shape) -> (&'static [u16], u32) {
    let left = |window: usize| u32::try_from(window - 1).unwrap();
    shape.window.map_or((&[], 0), |window| (&[0, 1, 2], left(window)))
}

fn spec() -> CacheSpecBuilder {
    CacheSpec::builder().layers(LAYERS).kv_heads(2).head_dim(HEAD_DIM)
}

/// Reads one `config.json` as the port's configuration and as candle's.
fn configs<A: DeserializeOwned, B: DeserializeOwned>(shape: Shape, own: &Value) -> (Value, A, B) {
    let mut config = json!({
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": false,
        "attention_bias": false,
        "sliding_window": shape.positions,
        "max_window_layers": 0,
        "use_sliding_window": false,
    });
    let fields = config.as_object_mut().unwrap();
    fields.extend(own.as_object().unwrap().clone());
    let [ours, theirs] = [config.clone(), config.clone()];
    (config, serde_json::from_value(ours).unwrap(), serde_json::from_value(theirs).unwrap())
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
            name if name.contains("q_norm") || name.contains("k_norm") => (1.5, 0.2),
            name if name.contains("norm") => (1.0, 0.2),
            name if name.contains("embed_tokens") => (0.0, 1.0),
            name if name.ends_with("bias") => (0.0, 0.3),
            name if ["q_proj", "k_proj", "qkv_proj"].iter().any(|part| name.contains(part)) => {
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
