//! Tensors whose axes are not those of the call: refused whatever their sizes, in the caller's
//! words.
#![expect(clippy::unwrap_used, reason = "tests")]
use candle_core::{Device, Tensor};
use kv_candle::CandleCache;
use kv_candle::kv::{AttentionOptions, CacheSpec, KvFormat, SequenceId, StartOptions, StepInput};

const DIM: usize = 8;

fn spec(kv_heads: usize) -> CacheSpec {
    let spec = CacheSpec::builder().layers(1).kv_heads(u32::try_from(kv_heads).unwrap());
    spec.head_dim(8).format(KvFormat::F32).paged(4, 8).build().unwrap()
}

fn cache(kv_heads: usize) -> CandleCache {
    let mut cache = CandleCache::new(&Device::Cpu, spec(kv_heads)).unwrap();
    cache.kv_mut().start(SequenceId(0), &[], StartOptions::default()).unwrap();
    cache
}

fn rows(dims: &[usize]) -> Tensor {
    Tensor::randn(0.0_f32, 1.0, dims, &Device::Cpu).unwrap()
}

fn options() -> AttentionOptions<'static> {
    AttentionOptions::causal(0.3)
}

/// Also where there are as many tokens as heads, and the shape says nothing.
#[test]
fn a_forgotten_squeeze_is_refused_whatever_the_sizes() {
    for kv_heads in 1..=6 {
        for (group, tokens) in (1..=3).flat_map(|group| (1..=7).map(move |t| (group, t))) {
            let mut cache = cache(kv_heads);
            let count = u32::try_from(tokens).unwrap();
            let step = cache.step(&[StepInput::count(SequenceId(0), count)]).unwrap();
            let [q, k] = [kv_heads * group, kv_heads].map(|heads| rows(&[1, tokens, heads, DIM]));
            let [q3, k3] = [&q, &k].map(|tensor| tensor.squeeze(0).unwrap());
            for (q, k, v, name) in [(&q, &k, &k, "q"), (&q3, &k, &k, "k"), (&q3, &k3, &k, "v")] {
                let error = step.attend(0, q, k, v, &options()).unwrap_err().to_string();
                let given = if name == "q" { q.dims() } else { k.dims() };
                let given = if name == "v" { v.dims() } else { given };
                let words =
                    format!("{name} has shape {given:?}, expected [tokens, heads, head_dim]");
                assert!(error.contains(&words) && error.contains("squeeze(0)"), "{error}");
            }
            let out = step.attend(0, &q3, &k3, &k3, &options()).unwrap();
            assert_eq!(out.dims(), [tokens, kv_heads * group * DIM]);
            step.commit().unwrap();
        }
    }
}

#[test]
fn shapes_are_named_as_they_were_passed() {
    let mut cache = cache(2);
    let step = cache.step(&[StepInput::count(SequenceId(0), 3)]).unwrap();
    let [q, k] = [4, 2].map(|heads| rows(&[1, heads, 3, DIM]));
    let refused = |q: &Tensor, k: &Tensor, v: &Tensor, words: &[&str]| {
        let error = step.attend_bhsd(0, q, k, v, &options()).unwrap_err().to_string();
        assert!(words.iter().all(|words| error.contains(words)), "{error}");
    };
    let swapped = k.transpose(1, 2).unwrap();
    let expected = "expected [b at least, heads, s at least, head_dim] = [1, 2, 3, 8]";
    refused(&q, &swapped, &k, &["k has shape [1, 3, 2, 8]", expected, "transpose(1, 2)"]);
    refused(&q, &k, &swapped, &["v has shape [1, 3, 2, 8]", expected, "transpose(1, 2)"]);
    let repeated = Tensor::cat(&[&k, &k], 1).unwrap();
    refused(&q, &repeated, &k, &["k has shape [1, 4, 3, 8]", expected, "not repeated heads"]);
    let narrow = k.narrow(3, 0, 4).unwrap();
    refused(&q, &k, &narrow, &["v has shape [1, 2, 3, 4]", expected]);
    refused(&q.narrow(3, 0, 4).unwrap(), &k, &k, &["q has shape [1, 4, 3, 4]"]);
    refused(&q.squeeze(0).unwrap(), &k, &k, &["q has shape [4, 3, 8]", "attend takes the packed"]);
    step.attend_bhsd(0, &q, &k, &k, &options()).unwrap();
    step.commit().unwrap();
}
