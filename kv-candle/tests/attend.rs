//! Attention over the cache against the same sums by candle's own operations.
#![expect(clippy::unwrap_used, reason = "tests")]
use candle_core::{D, DType, Device, Result, Tensor};
use kv_candle::kv::spec::PrefixReuse;
use kv_candle::kv::{AttentionOptions, CacheSpec, KvFormat, SequenceId, StartOptions, StepInput};
use kv_candle::{CandleCache, Error};

const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const DIM: usize = 16;
const SCALE: f64 = 0.25;

fn cache(format: KvFormat) -> CandleCache {
    let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dim(16).format(format);
    let spec = spec.prefix_reuse(PrefixReuse::Partial).paged(4, 64).build().unwrap();
    CandleCache::new(&Device::Cpu, spec).unwrap()
}

fn options() -> AttentionOptions<'static> {
    AttentionOptions::causal(0.25)
}

/// The q, k and v of a sequence's first `len` tokens, each `[len, heads, dim]`: rows follow from
/// sequence and position.
fn rows(sequence: u64, len: usize) -> [Tensor; 3] {
    let of = |heads: usize, part: u64| {
        let count = len * heads * DIM;
        let value = |at: usize| {
            let at = u32::try_from(at).unwrap();
            let seed = u32::try_from(sequence * 3 + part).unwrap();
            let mixed = (at + 1).wrapping_mul(0x9e37_79b9 ^ seed.wrapping_mul(0x85eb_ca6b));
            f32::from(u16::try_from(mixed >> 16).unwrap()) / 32768.0 - 1.0
        };
        let values: Vec<f32> = (0..count).map(value).collect();
        Tensor::from_vec(values, (len, heads, DIM), &Device::Cpu).unwrap()
    };
    [of(HEADS, 0), of(KV_HEADS, 1), of(KV_HEADS, 2)]
}

/// Attention of the last `new` of some tokens over all of them, `[new, heads * dim]`.
fn expected(rows: &[Tensor; 3], new: usize) -> Tensor {
    let attend = || -> Result<Tensor> {
        let [q, k, v] = rows;
        let len = q.dim(0)?;
        let repeat = |tensor: &Tensor| -> Result<Tensor> {
            let tensor = tensor.transpose(0, 1)?.unsqueeze(1)?;
            let tensor = tensor.expand((KV_HEADS, HEADS / KV_HEADS, len, DIM))?;
            tensor.reshape((HEADS, len, DIM))
        };
        let scores = (q.transpose(0, 1)?.contiguous()?.matmul(&repeat(k)?.t()?)? * SCALE)?;
        let hidden = |at: usize| if at % len > at / len { f32::NEG_INFINITY } else { 0.0 };
        let mask: Vec<f32> = (0..len * len).map(hidden).collect();
        let scores = scores.broadcast_add(&Tensor::from_vec(mask, (len, len), &Device::Cpu)?)?;
        let scores = candle_nn::ops::softmax(&scores, D::Minus1)?;
        let out = scores.matmul(&repeat(v)?)?.transpose(0, 1)?.reshape((len, HEADS * DIM))?;
        out.narrow(0, len - new, new)
    };
    attend().unwrap()
}

#[track_caller]
fn assert_close(got: &Tensor, expected: &Tensor, tolerance: f32) {
    assert_eq!(got.dims(), expected.dims());
    let got = got.to_dtype(DType::F32).unwrap();
    let worst = (got - expected).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
    let worst = worst.to_scalar::<f32>().unwrap();
    assert!(worst <= tolerance, "{worst} apart");
}

fn part(rows: &[Tensor; 3], from: usize, len: usize) -> [Tensor; 3] {
    rows.each_ref().map(|rows| rows.narrow(0, from, len).unwrap())
}

fn joined(parts: &[[Tensor; 3]]) -> [Tensor; 3] {
    [0, 1, 2].map(|at| {
        let parts: Vec<_> = parts.iter().filter_map(|part| part.get(at)).collect();
        Tensor::cat(&parts, 0).unwrap()
    })
}

/// Sequences of different lengths in one batch, which come, go on in chunks, and go.
#[test]
fn ragged_batches_are_each_sequence_alone() {
    let mut cache = cache(KvFormat::F32);
    let mut lens = [0_usize; 3];
    for step in 0..9 {
        // The third one comes late, and the first is done after a while.
        let new: Vec<(u64, usize)> = [(0, 5), (1, 1), (2, 7)]
            .into_iter()
            .filter(|(sequence, _)| (*sequence != 2 || step >= 3) && (*sequence != 0 || step < 6))
            .map(|(sequence, first)| (sequence, if step % 4 == 0 { first } else { 1 }))
            .collect();
        if step == 6 {
            cache.kv_mut().release(SequenceId(0)).unwrap();
        }
        let tokens: Vec<Vec<u32>> = new
            .iter()
            .map(|(sequence, count)| {
                let at = usize::try_from(*sequence).unwrap();
                let first = u32::try_from(at * 1000 + lens[at]).unwrap();
                (first..).take(*count).collect()
            })
            .collect();
        for (sequence, _) in &new {
            if !cache.kv().state().contains(SequenceId(*sequence)) {
                let started =
                    cache.kv_mut().start(SequenceId(*sequence), &[], StartOptions::default());
                assert_eq!(started.unwrap(), 0);
            }
        }
        let inputs: Vec<_> = new
            .iter()
            .zip(&tokens)
            .map(|((sequence, _), tokens)| StepInput::tokens(SequenceId(*sequence), tokens))
            .collect();
        let open = cache.step(&inputs).unwrap();
        let (mut parts, mut outs, mut positions, mut last) = (vec![], vec![], vec![], vec![]);
        for (sequence, count) in &new {
            let at = usize::try_from(*sequence).unwrap();
            let all = rows(*sequence, lens[at] + count);
            positions.extend(lens[at]..lens[at] + count);
            last.push(positions.len() - 1);
            parts.push(part(&all, lens[at], *count));
            outs.push(expected(&all, *count));
            lens[at] += count;
        }
        let as_u32 = |all: Vec<usize>| -> Vec<u32> {
            all.into_iter().map(|at| u32::try_from(at).unwrap()).collect()
        };
        assert_eq!(open.positions().to_vec1::<u32>().unwrap(), as_u32(positions));
        assert_eq!(open.last_rows().to_vec1::<u32>().unwrap(), as_u32(last));
        let [q, k, v] = joined(&parts);
        for layer in 0..2 {
            let out = open.attend(layer, &q, &k, &v, &options()).unwrap();
            assert_close(&out, &Tensor::cat(&outs, 0).unwrap(), 2e-6);
        }
        assert_eq!(open.copies(), 0);
        open.commit().unwrap();
    }
    assert!(lens.iter().all(|len| *len > 8), "{lens:?}");
}

/// What most of candle's models have: heads before tokens, views of projections.
#[test]
fn heads_before_tokens_are_read_in_place_after_a_transpose() {
    let mut cache = cache(KvFormat::F32);
    let ids = [SequenceId(1), SequenceId(2)];
    for id in ids {
        cache.kv_mut().start(id, &[], StartOptions::default()).unwrap();
    }
    let mut done = 0;
    for new in [6, 1, 3] {
        let tokens = [0, 1000].map(|first| (first + done..first + done + new).collect::<Vec<_>>());
        let [one, two] = &tokens;
        let inputs = [StepInput::tokens(ids[0], one), StepInput::tokens(ids[1], two)];
        let step = cache.step(&inputs).unwrap();
        let [from, count] = [done, new].map(|at| usize::try_from(at).unwrap());
        let all = ids.map(|id| rows(id.0, from + count));
        let new_rows = all.each_ref().map(|rows| part(rows, from, count));
        let [q, k, v] = [0, 1, 2].map(|at| {
            let [one, two] = new_rows.each_ref().map(|rows| rows.get(at).unwrap());
            Tensor::stack(&[one, two], 0).unwrap().transpose(1, 2).unwrap()
        });
        let outs = all.each_ref().map(|rows| expected(rows, count));
        let expected = Tensor::stack(&outs, 0).unwrap();
        assert_close(&step.attend_bhsd(0, &q, &k, &v, &options()).unwrap(), &expected, 2e-6);
        assert_eq!(step.copies(), 0, "{new} tokens");
        // After `contiguous`, as RoPE of candle wants it: one token needs no copy.
        let dense = [q, k, v].map(|tensor| tensor.contiguous().unwrap());
        let [q, k, v] = &dense;
        assert_close(&step.attend_bhsd(1, q, k, v, &options()).unwrap(), &expected, 2e-6);
        assert_eq!(step.copies(), if new == 1 { 0 } else { 3 });
        step.commit().unwrap();
        done += new;
    }
}

#[test]
fn half_precision_and_few_bits_come_close() {
    for (dtype, format, tolerance) in [
        (DType::F16, KvFormat::F16, 2e-3),
        (DType::BF16, KvFormat::Bf16, 2e-2),
        (DType::F32, KvFormat::Bf16, 1e-2),
        (DType::F32, "int8".parse().unwrap(), 2e-2),
    ] {
        let mut cache = cache(format);
        cache.kv_mut().start(SequenceId(1), &[], StartOptions::default()).unwrap();
        let step = cache.step(&[StepInput::count(SequenceId(1), 20)]).unwrap();
        let all = rows(1, 20);
        let [q, k, v] = all.each_ref().map(|rows| rows.to_dtype(dtype).unwrap());
        for layer in 0..2 {
            let out = step.attend(layer, &q, &k, &v, &options()).unwrap();
            assert_eq!(out.dtype(), dtype);
            assert_close(&out, &expected(&all, 20), tolerance);
        }
        step.commit().unwrap();
    }
}

#[test]
fn a_fork_and_a_prefix_are_computed_once() {
    let mut cache = cache(KvFormat::F32);
    let prompt: Vec<u32> = (0..10).collect();
    let fill = |cache: &mut CandleCache, id: SequenceId, from: usize, tokens: &[u32]| {
        let step = cache.step(&[StepInput::tokens(id, tokens)]).unwrap();
        let all = rows(7, from + tokens.len());
        let [q, k, v] = part(&all, from, tokens.len());
        for layer in 0..2 {
            let out = step.attend(layer, &q, &k, &v, &options()).unwrap();
            assert_close(&out, &expected(&all, tokens.len()), 2e-6);
        }
        step.commit().unwrap();
    };
    let start = |cache: &mut CandleCache, id| {
        cache.kv_mut().start(id, &prompt, StartOptions::default()).unwrap()
    };
    assert_eq!(start(&mut cache, SequenceId(1)), 0);
    fill(&mut cache, SequenceId(1), 0, &prompt);
    // Another prompt with the same beginning computes what lies after the last full block.
    assert_eq!(start(&mut cache, SequenceId(2)), 8);
    fill(&mut cache, SequenceId(2), 8, &prompt[8..]);
    cache.kv_mut().fork(SequenceId(2), SequenceId(3)).unwrap();
    fill(&mut cache, SequenceId(3), 10, &[10, 11]);
    fill(&mut cache, SequenceId(2), 10, &[10]);
    assert_eq!(cache.kv().state().seq_len(SequenceId(3)), Some(12));
}

#[test]
fn what_does_not_fit_is_an_error_of_candle_and_the_step_goes_on() {
    let mut cache = cache(KvFormat::F32);
    cache.kv_mut().start(SequenceId(1), &[], StartOptions::default()).unwrap();
    let all = rows(1, 3);
    let [q, k, v] = &all;
    let step = cache.step(&[StepInput::count(SequenceId(1), 3)]).unwrap();
    let refused = |layer, q: &Tensor, k: &Tensor, v: &Tensor, words: &str| {
        let error = step.attend(layer, q, k, v, &options()).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let half = k.to_dtype(DType::F16).unwrap();
    refused(0, q, &half, v, "q is F32, k is F16, v is F32");
    let doubles = all.each_ref().map(|rows| rows.to_dtype(DType::F64).unwrap());
    refused(0, &doubles[0], &doubles[1], &doubles[2], "f32, f16 or bf16");
    refused(2, q, k, v, "layer 2");
    refused(70_000, q, k, v, "no layer 70000");
    refused(0, q, q, v, "6");
    refused(0, q, &k.narrow(0, 0, 2).unwrap(), v, "2");
    refused(0, q, &k.narrow(2, 0, 8).unwrap(), v, "8");
    refused(0, &q.flatten_from(1).unwrap(), k, v, "q has shape [3, 96], expected [tokens, heads");
    refused(0, &q.unsqueeze(0).unwrap(), k, v, "squeeze(0)");
    assert_close(&step.attend(0, q, k, v, &options()).unwrap(), &expected(&all, 3), 2e-6);
    // A layer was forgotten.
    let forgotten = step.commit().unwrap_err();
    assert!(matches!(forgotten, Error::Cache(_)) && forgotten.to_string().contains('1'));
    assert_eq!(cache.kv().state().seq_len(SequenceId(1)), Some(0));
    // A step that is dropped, after an error of the model say, never happened.
    let step = cache.step(&[StepInput::count(SequenceId(1), 3)]).unwrap();
    step.attend(0, q, k, v, &options()).unwrap();
    drop(step);
    assert_eq!(cache.kv().state().seq_len(SequenceId(1)), Some(0));
    assert_eq!(cache.kv().state().usage().blocks_used, 0);
}
