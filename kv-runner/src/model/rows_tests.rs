//! Rows with a cached prefix, which equal rows without one to the bit. A prompt with a cached
//! prefix is computed in a step of fewer tokens, and candle's matrix products of one row, of a few
//! and of many add in different orders: logits differ in their last bits.
use std::path::Path;

use candle_core::{Device, Module, Tensor};
use kv::backend::Plane;
use kv::cpu::{CpuBackend, CpuOptions};
use kv::quant::Stored;
use kv::spec::{Determinism, PrefixReuse};
use kv::{Axes, KvCache, KvFormat, SequenceId, StartOptions, StepInput, TensorViewMut};
use kv_candle::CandleStep;

use super::layer::Mixer;
use super::{Decoder, with_values};
use crate::num::{to_u32, to_usize};
use crate::text::Tokenizer;

type Cache = KvCache<CpuBackend>;

/// Rows of Q, K and V of each layer, and the logits after the last token.
struct Computed {
    rows: Vec<[Vec<u32>; 3]>,
    logits: Vec<f32>,
}

/// The bundled model, and a prompt of at least 27 tokens.
fn model() -> (Decoder, Vec<u32>) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K");
    let model = Decoder::read(&dir).expect("the bundled model");
    let tokenizer = Tokenizer::read(&dir.join("tokenizer.json")).expect("its tokenizer");
    let text = "Emoji: \u{1f600}\u{1f389} \u{4e2d}\u{6587} \u{65e5}\u{672c}\u{8a9e}";
    let tokens = tokenizer.encode(text, model.config()).expect("tokens").tokens;
    assert!(tokens.len() >= 27, "{}", tokens.len());
    (model, tokens)
}

/// A cache as an engine has it.
fn cache(model: &Decoder) -> Cache {
    let backend = CpuBackend::open(CpuOptions::default().with_threads(1)).expect("the CPU");
    let spec = model.config().spec(&Stored::plain(KvFormat::F32), |spec| {
        let spec = spec.paged(4, 64).prefix_reuse(PrefixReuse::Partial);
        spec.determinism(Determinism::BatchInvariant)
    });
    KvCache::new(backend, spec.expect("a cache")).expect("memory")
}

fn start(cache: &mut Cache, id: SequenceId, tokens: &[u32]) -> usize {
    to_usize(cache.start(id, tokens, StartOptions::default()).expect("starts"))
}

fn last_of(tokens: &[u32]) -> usize {
    tokens.len().saturating_sub(1)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Computes the next tokens of a sequence in one step.
fn compute(model: &Decoder, cache: &mut Cache, id: SequenceId, tokens: &[u32]) -> Computed {
    let step = cache.begin_step(&[StepInput::tokens(id, tokens)]).expect("a step");
    let step = CandleStep::over(step, &Device::Cpu).expect("positions");
    let mut rows = Vec::new();
    let hidden = model.hidden(&step, tokens, &mut |tapped| {
        rows.push([tapped.q, tapped.k, tapped.v].map(bits));
        Ok(())
    });
    step.commit().expect("commits");
    let last = hidden.and_then(|hidden| Ok(hidden.narrow(0, last_of(tokens), 1)?));
    let logits = last.and_then(|last| Ok(model.logits(&last)?.flatten_all()?.to_vec1()?));
    Computed { rows, logits: logits.expect("logits") }
}

/// Reads K or V of the first tokens of a sequence from the cache.
fn cached(
    model: &Decoder,
    cache: &mut Cache,
    id: SequenceId,
    plane: Plane,
    tokens: usize,
) -> Vec<Vec<u32>> {
    let (heads, dim) = (to_usize(model.config.kv_heads), to_usize(model.config.head_dim));
    let layers = 0..u16::try_from(model.layers.len()).expect("few layers");
    let read = |layer| {
        let dims = [tokens, heads, dim];
        let mut rows = vec![0.0_f32; dims.iter().product()];
        let dims = dims.map(to_u32);
        let out = TensorViewMut::host(&mut rows, &dims);
        let range = [(id, 0, to_u32(tokens))];
        cache.gather(layer, plane, &range, out, Axes::Thd).expect("cached rows");
        bits(&rows)
    };
    layers.map(read).collect()
}

/// Asserts that K and V of the first tokens of a sequence are those of a step.
fn assert_cached(model: &Decoder, cache: &mut Cache, id: SequenceId, of: &Computed, tokens: usize) {
    for (plane, at) in [(Plane::Key, 1), (Plane::Value, 2)] {
        let read = cached(model, cache, id, plane, tokens);
        for (layer, (read, computed)) in read.iter().zip(&of.rows).enumerate() {
            assert_eq!(read, &computed[at][..read.len()], "{plane:?} of layer {layer}");
        }
    }
}

#[test]
fn a_cached_prefix_is_that_of_the_run_that_left_it_and_changes_no_bit() {
    let (model, tokens) = model();
    let [first, second] = [1, 2].map(SequenceId);
    for reused in [1, 4, 7, 16, tokens.len() - 1] {
        let (prefix, rest) = tokens.split_at(reused);
        let mut cold = cache(&model);
        start(&mut cold, first, &tokens);
        compute(&model, &mut cold, first, prefix);
        let expected = compute(&model, &mut cold, first, rest);

        // Another text leaves the prefix, whose last block goes on differently.
        let mut warm = cache(&model);
        let other = (rest[0] + 1) % model.config.vocab;
        start(&mut warm, first, &[prefix, &[other]].concat());
        let left = compute(&model, &mut warm, first, prefix);
        compute(&model, &mut warm, first, &[other]);
        warm.release(first).expect("releases");
        assert_eq!(start(&mut warm, second, &tokens), reused);
        assert_cached(&model, &mut warm, second, &left, reused);
        let got = compute(&model, &mut warm, second, rest);
        assert_eq!(got.rows, expected.rows, "{reused} tokens cached");
        assert_eq!(bits(&got.logits), bits(&expected.logits), "{reused} tokens cached");
        assert_cached(&model, &mut warm, second, &left, reused);
    }
}

/// Computes the products of the first layer for all tokens and for the last alone; returns the last
/// row of each. The input is the embedding of the token, normalised: nothing from a cache.
fn first_products(model: &Decoder, tokens: &[u32]) -> [[Vec<u32>; 3]; 2] {
    let of = |tokens: &[u32]| {
        let ids = Tensor::from_slice(tokens, tokens.len(), &Device::Cpu).expect("ids");
        let embedded = model.embedding.index_select(&ids, 0).expect("rows");
        let layer = &model.layers[0];
        let h = model.norm(embedded, layer.mixer_norm.as_ref()).expect("norms");
        let last = |x: &Tensor| {
            let row = x.narrow(0, last_of(tokens), 1).and_then(|row| row.contiguous());
            with_values(&row.expect("a row"), bits)
        };
        let Mixer::Attention(layer) = &layer.mixer else { panic!("all layers attend") };
        let products = [&layer.q, &layer.k, &layer.v];
        (last(&h), products.map(|weight| last(&weight.forward(&h).expect("a product"))))
    };
    let (all, alone) = (of(tokens), of(&tokens[last_of(tokens)..]));
    assert_eq!(all.0, alone.0, "what is multiplied is equal");
    [all.1, alone.1]
}

#[test]
fn a_prompt_that_was_cached_differs_by_the_rounding_of_its_products_alone() {
    let (model, tokens) = model();
    let [first, second] = [1, 2].map(SequenceId);
    let mut cache = cache(&model);
    start(&mut cache, first, &tokens);
    let cold = compute(&model, &mut cache, first, &tokens);
    cache.release(first).expect("releases");
    let reused = start(&mut cache, second, &tokens);
    assert_eq!(reused, tokens.len() - 1);
    assert_cached(&model, &mut cache, second, &cold, reused);
    let warm = compute(&model, &mut cache, second, &tokens[reused..]);

    let differences = cold.logits.iter().zip(&warm.logits).map(|(a, b)| (a - b).abs());
    let largest = differences.fold(0.0, f32::max);
    assert!(largest < 1e-4, "{largest}");
    // Before anything cached is read, Q, K and V of the last token differ exactly if the products
    // do, which depends on the processor.
    let [all, alone] = first_products(&model, &tokens);
    for at in 0..3 {
        let (cold, warm) = (&cold.rows[0][at], &warm.rows[0][at]);
        let is_equal = cold[cold.len() - warm.len()..] == warm[..];
        assert_eq!(is_equal, all[at] == alone[at], "product {at} of the first layer");
    }
}
