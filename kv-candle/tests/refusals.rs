//! Bad input and errors half way: what is refused, and that the cache is as before.
#![expect(clippy::unwrap_used, reason = "tests")]
use candle_core::{DType, Device, Result, Tensor};
use kv_candle::kv::error::PlanError;
use kv_candle::kv::{AttentionOptions, CacheError, CacheSpec, KvFormat};
use kv_candle::kv::{SequenceId, StartOptions, StepInput};
use kv_candle::{CandleCache, CandleStep, Error};

const SEQUENCE: SequenceId = SequenceId(1);

fn spec() -> CacheSpec {
    let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dim(8).format(KvFormat::F32);
    spec.paged(4, 8).build().unwrap()
}

/// Makes a cache with a sequence of five tokens: one block is full, one is not.
fn cache() -> CandleCache {
    let mut cache = CandleCache::new(&Device::Cpu, spec()).unwrap();
    cache.kv_mut().start(SEQUENCE, &[], StartOptions::default()).unwrap();
    pass(&mut cache, 0, 5).unwrap();
    cache
}

/// Makes random numbers, the same for every call with these arguments.
fn numbers(seed: u32, dims: &[usize]) -> Tensor {
    let count = dims.iter().product::<usize>();
    let number = |at: u32| {
        let mixed = (at + 1).wrapping_mul(0x9e37_79b9 ^ seed.wrapping_mul(0x85eb_ca6b));
        f32::from(u16::try_from(mixed >> 16).unwrap()) / 32768.0 - 1.0
    };
    let values: Vec<f32> = (0..u32::try_from(count).unwrap()).map(number).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
}

/// Returns q, k and v of `new` tokens after the first `from`.
fn qkv(from: usize, new: usize) -> [Tensor; 3] {
    [(1, 4), (2, 2), (3, 2)]
        .map(|(seed, heads)| numbers(seed, &[32, heads, 8]).narrow(0, from, new).unwrap())
}

fn options() -> AttentionOptions<'static> {
    AttentionOptions::causal(0.3)
}

/// Attends in all layers and commits; returns the last layer's output.
fn pass(cache: &mut CandleCache, from: usize, new: usize) -> std::result::Result<Tensor, Error> {
    let count = u32::try_from(new).unwrap();
    let step = cache.step(&[StepInput::count(SEQUENCE, count)])?;
    let [q, k, v] = qkv(from, new);
    step.attend(0, &q, &k, &v, &options())?;
    let out = step.attend(1, &q, &k, &v, &options())?;
    step.commit()?;
    Ok(out)
}

/// Checks that a cache is that of [`cache`], and goes on as that one does.
#[track_caller]
fn assert_as_before(cache: &mut CandleCache) {
    let usage = cache.kv().state().usage();
    assert_eq!((usage.sequences, usage.tokens, usage.blocks_used), (1, 5, 2));
    assert_eq!(cache.kv().state().seq_len(SEQUENCE), Some(5));
    assert!(!cache.kv().state().is_step_open());
    assert_same(&pass(cache, 5, 3).unwrap(), &pass(&mut self::cache(), 5, 3).unwrap());
}

#[track_caller]
fn assert_same(got: &Tensor, expected: &Tensor) {
    assert_eq!(got.dims(), expected.dims());
    let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(values(got), values(expected));
}

#[test]
fn a_step_that_cannot_begin_changes_nothing() {
    let mut cache = cache();
    let other = SequenceId(2);
    cache.kv_mut().start(other, &[], StartOptions::default()).unwrap();
    let mut refused = |inputs: &[StepInput<'_>]| match cache.step(inputs).unwrap_err() {
        Error::Cache(error) => error,
        error => panic!("{error}"),
    };
    let count = |tokens| StepInput::count(SEQUENCE, tokens);
    let unknown = refused(&[count(1), StepInput::count(SequenceId(3), 1)]);
    assert!(matches!(unknown, CacheError::Plan(PlanError::UnknownSequence { .. })), "{unknown}");
    let twice = refused(&[count(1), count(1)]);
    assert!(matches!(twice, CacheError::Plan(PlanError::DuplicateSequence { .. })), "{twice}");
    let none = refused(&[count(0)]);
    assert!(matches!(none, CacheError::Plan(PlanError::ZeroTokens { .. })), "{none}");
    let long = refused(&[count(8 * 4 - 5 + 1)]);
    assert!(matches!(long, CacheError::Plan(PlanError::SequenceTooLong { .. })), "{long}");
    let full = refused(&[count(15), StepInput::count(other, 13)]);
    assert!(matches!(full, CacheError::Exhausted(_)), "{full}");
    cache.kv_mut().release(other).unwrap();
    assert_as_before(&mut cache);
}

#[test]
fn a_step_of_no_sequences_has_no_rows() {
    let mut cache = cache();
    let step = cache.step(&[]).unwrap();
    assert_eq!((step.positions().dims(), step.last_rows().dims()), (&[0][..], &[0][..]));
    let [q, k, v] = qkv(0, 0);
    for layer in 0..2 {
        assert_eq!(step.attend(layer, &q, &k, &v, &options()).unwrap().dims(), [0, 32]);
    }
    step.commit().unwrap();
    assert_as_before(&mut cache);
}

#[test]
fn a_layer_that_was_forgotten_is_named_and_the_step_rolled_back() {
    let mut cache = cache();
    let [q, k, v] = qkv(5, 9);
    let step = cache.step(&[StepInput::count(SEQUENCE, 9)]).unwrap();
    step.attend(1, &q, &k, &v, &options()).unwrap();
    let error = step.commit().unwrap_err();
    let Error::Cache(CacheError::Plan(PlanError::LayersUnwritten { .. })) = &error else {
        panic!("{error}");
    };
    assert!(error.to_string().contains("layer 0"), "{error}");
    assert_as_before(&mut cache);
}

#[test]
fn more_accepted_tokens_than_there_are_roll_the_step_back() {
    for accepted in [&[4_u32][..], &[], &[1, 1]] {
        let mut cache = cache();
        let [q, k, v] = qkv(5, 3);
        let step = cache.step(&[StepInput::count(SEQUENCE, 3)]).unwrap();
        for layer in 0..2 {
            step.attend(layer, &q, &k, &v, &options()).unwrap();
        }
        let error = step.commit_accepted(accepted).unwrap_err();
        assert!(matches!(error, Error::Cache(CacheError::Plan(_))), "{error}");
        assert_as_before(&mut cache);
    }
}

/// A model whose second layer fails after its rows are written.
/// A step of an engine: the model writes and attends, and cannot end it.
#[test]
fn a_lent_step_is_ended_by_its_owner_alone() {
    let mut cache = cache().into_kv();
    let [q, k, v] = qkv(5, 1);
    let mut step = cache.begin_step(&[StepInput::count(SEQUENCE, 1)]).unwrap();
    for accepted in [None, Some([1])] {
        let lent = CandleStep::over_mut(&mut step, &Device::Cpu).unwrap();
        assert_eq!(lent.positions().to_vec1::<u32>().unwrap(), [5]);
        assert_eq!(lent.last_rows().to_vec1::<u32>().unwrap(), [0]);
        for layer in 0..2 {
            lent.attend(layer, &q, &k, &v, &options()).unwrap();
        }
        assert_eq!(lent.with_step(|step| step.sequences().len()), 1);
        let refused = match accepted {
            None => lent.commit(),
            Some(accepted) => lent.commit_accepted(&accepted),
        };
        assert!(matches!(refused, Err(Error::Lent)), "{refused:?}");
    }
    step.commit().unwrap();
    assert_eq!(cache.state().seq_len(SEQUENCE), Some(6));
}

#[test]
fn an_error_of_candle_inside_a_step_rolls_it_back() {
    fn model(step: &CandleStep<'_>) -> Result<Tensor> {
        let [q, k, v] = qkv(5, 9);
        let x = step.attend(0, &q, &k, &v, &options())?;
        step.attend(1, &q, &k, &v, &options())?;
        x.matmul(&x)
    }
    fn decode(cache: &mut CandleCache) -> std::result::Result<Tensor, Error> {
        let step = cache.step(&[StepInput::count(SEQUENCE, 9)])?;
        let logits = model(&step)?;
        step.commit()?;
        Ok(logits)
    }
    let mut cache = cache();
    let error = decode(&mut cache).unwrap_err();
    assert!(matches!(error, Error::Candle(_)), "{error}");
    assert_as_before(&mut cache);
}

#[test]
fn tensors_that_do_not_fit_the_step_are_refused_and_it_goes_on() {
    let mut cache = cache();
    let [q, k, v] = qkv(5, 3);
    let step = cache.step(&[StepInput::count(SEQUENCE, 3)]).unwrap();
    let refused = |q: &Tensor, k: &Tensor, v: &Tensor, words: &str| {
        let error = step.attend(0, q, k, v, &options()).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let heads = |tensor: &Tensor, count: usize| tensor.narrow(1, 0, count).unwrap();
    refused(&heads(&q, 3), &k, &v, "3");
    refused(&q, &heads(&k, 1), &v, "1");
    refused(&q, &k, &heads(&v, 1), "1");
    refused(&q, &k, &v.narrow(2, 0, 4).unwrap(), "4");
    let fewer = qkv(5, 2);
    refused(&fewer[0], &k, &v, "2");
    refused(&q, &fewer[1], &v, "2");
    refused(&q, &k, &fewer[2], "2");
    for dtype in [DType::U8, DType::U32, DType::I64, DType::F64] {
        let all = [&q, &k, &v].map(|tensor| tensor.to_dtype(dtype).unwrap());
        let [q, k, v] = &all;
        refused(q, k, v, &format!("{dtype:?}"));
    }
    for dtype in [DType::F16, DType::BF16] {
        refused(&q.to_dtype(dtype).unwrap(), &k, &v, "q is");
        refused(&q, &k, &v.to_dtype(dtype).unwrap(), "v is");
    }
    // Every mixture of ranks, and of axes.
    let batched = [&q, &k, &v].map(|it| it.unsqueeze(0).unwrap().transpose(1, 2).unwrap());
    let [q4, k4, v4] = &batched;
    for (q, k, v) in [(&q, k4, v4), (q4, &k, v4), (q4, k4, &v), (&q, &k, v4), (&q, k4, &v)] {
        refused(q, k, v, "expected [tokens, heads, head_dim]");
        let error = step.attend_bhsd(0, q, k, v, &options()).unwrap_err().to_string();
        assert!(error.contains("expected [b, heads, s, head_dim]"), "{error}");
    }
    refused(&q.unsqueeze(0).unwrap().unsqueeze(0).unwrap(), &k, &v, "[1, 1, 3, 4, 8]");
    refused(&q.flatten_all().unwrap(), &k, &v, "[96]");
    let refused = |q: &Tensor, k: &Tensor, v: &Tensor, words: &str| {
        let error = step.attend_bhsd(0, q, k, v, &options()).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let short = batched.each_ref().map(|tensor| tensor.narrow(2, 0, 2).unwrap());
    refused(&short[0], k4, v4, "q has shape [1, 4, 2, 8]");
    refused(q4, &short[1], v4, "k has shape [1, 2, 2, 8]");
    let none = batched.each_ref().map(|tensor| tensor.narrow(0, 0, 0).unwrap());
    refused(&none[0], &none[1], &none[2], "[0, 2, 3, 8]");
    drop(step);
    assert_as_before(&mut cache);
}

/// The cache needs as many rows and batch entries as the step has, at least.
#[test]
fn what_is_past_the_tokens_of_a_step_is_padding_and_comes_back_as_zeros() {
    let mut cache = cache();
    let expected = pass(&mut cache, 5, 3).unwrap();
    cache.kv_mut().truncate(SEQUENCE, 5).unwrap();
    let longer = qkv(5, 6);
    let batch = longer.each_ref().map(|tensor| {
        let zeros = tensor.zeros_like().unwrap();
        Tensor::stack(&[tensor, &zeros], 0).unwrap().transpose(1, 2).unwrap()
    });
    for (tensors, rows) in [(&longer, 6), (&batch, 12)] {
        let [q, k, v] = tensors;
        let step = cache.step(&[StepInput::count(SEQUENCE, 3)]).unwrap();
        let out = match rows {
            6 => step.attend(0, q, k, v, &options()),
            _ => step.attend_bhsd(0, q, k, v, &options()),
        };
        let out = out.unwrap().reshape((rows, 32)).unwrap();
        assert_same(&out.narrow(0, 0, 3).unwrap(), &expected);
        let rest = out.narrow(0, 3, rows - 3).unwrap();
        assert_same(&rest, &rest.zeros_like().unwrap());
        drop(step);
    }
    assert_as_before(&mut cache);
}

#[test]
fn options_that_mean_nothing_are_refused_and_the_step_goes_on() {
    let mut cache = cache();
    let [q, k, v] = qkv(5, 3);
    let step = cache.step(&[StepInput::count(SEQUENCE, 3)]).unwrap();
    for (options, words) in [
        (AttentionOptions::causal(f32::NAN), "scale"),
        (options().with_soft_cap(0.0), "soft_cap"),
        (options().with_sink_logits(&[0.0; 3]), "sink_logits"),
        (options().with_sink_logits(&[0.0, 0.0, f32::NAN, 0.0]), "sink_logits"),
    ] {
        let error = step.attend(0, &q, &k, &v, &options).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    for layer in 0..2 {
        step.attend(layer, &q, &k, &v, &options()).unwrap();
    }
    step.commit().unwrap();
    assert_eq!(cache.kv().state().seq_len(SEQUENCE), Some(8));
}

/// Lays the same values out otherwise.
type Layout<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;

/// Values apart, heads apart, and one row for all tokens: copied, and counted.
#[test]
fn rows_that_cannot_be_read_in_place_give_the_same_attention() {
    let spread = |tensor: &Tensor| {
        // The same values in another order in memory.
        let last = tensor.rank() - 1;
        let swapped = tensor.transpose(last - 1, last)?.contiguous()?;
        swapped.transpose(last - 1, last)
    };
    let padded = |tensor: &Tensor| {
        let last = tensor.rank() - 1;
        Tensor::cat(&[tensor, &tensor.zeros_like()?], last)?.narrow(last, 0, 8)
    };
    let once = |tensor: &Tensor| tensor.narrow(0, 0, 1)?.expand(tensor.dims());
    let layouts: [Layout<'_>; 3] = [&spread, &padded, &once];
    for layout in layouts {
        let step_of = |is_dense: bool| {
            let mut cache = cache();
            let all = qkv(5, 3).map(|tensor| layout(&tensor).unwrap());
            let dense = all.each_ref().map(|tensor| tensor.force_contiguous().unwrap());
            let [q, k, v] = if is_dense { dense } else { all };
            let step = cache.step(&[StepInput::count(SEQUENCE, 3)]).unwrap();
            let out = step.attend(0, &q, &k, &v, &options()).unwrap();
            (out, step.copies())
        };
        let (expected, none) = step_of(true);
        let (got, copies) = step_of(false);
        assert_eq!((none, copies), (0, 3));
        assert_same(&got, &expected);
    }
}

#[test]
fn parts_of_a_fused_projection_are_read_in_place() {
    let mut cache = cache();
    let expected = pass(&mut cache, 5, 3).unwrap();
    cache.kv_mut().truncate(SEQUENCE, 5).unwrap();
    let fused = Tensor::cat(&qkv(5, 3), 1).unwrap();
    let [q, k, v] = [(0, 4), (4, 2), (6, 2)].map(|(at, heads)| fused.narrow(1, at, heads).unwrap());
    let step = cache.step(&[StepInput::count(SEQUENCE, 3)]).unwrap();
    assert_same(&step.attend(0, &q, &k, &v, &options()).unwrap(), &expected);
    assert_eq!(step.copies(), 0);
    drop(step);
    assert_as_before(&mut cache);
}
