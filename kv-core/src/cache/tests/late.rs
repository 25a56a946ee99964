//! Layers that are allocated when tokens are cached already.
use super::*;
use crate::backend::Plane;
use crate::spec::LateLayers;

const PROMPT: [u32; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];

fn lazy() -> KvCache<NullBackend> {
    lazy_with(LateLayers::default())
}

fn lazy_with(late_layers: LateLayers) -> KvCache<NullBackend> {
    let spec = CacheSpec::builder().layers_on_demand().kv_heads(1).head_dim(2).paged(4, 12);
    let spec = spec.late_layers(late_layers).events(16).build().unwrap();
    KvCache::new(NullBackend::new(), spec).unwrap()
}

/// Computes the missing tokens of a prompt, in `layers` layers.
fn append_prompt(
    cache: &mut KvCache<NullBackend>,
    id: SequenceId,
    tokens: &[u32],
    layers: u16,
) -> Result<(), CacheError> {
    let mut step = cache.begin_step(&[StepInput::tokens(id, tokens)])?;
    write_to(&mut step, tokens.len(), layers)?;
    step.commit()
}

fn write_to(
    step: &mut Step<'_, NullBackend>,
    tokens: usize,
    layers: u16,
) -> Result<(), CacheError> {
    let rows = vec![0.0_f32; tokens * 2];
    let dims = [u32::try_from(tokens).unwrap(), 1, 2];
    for layer in 0..layers {
        let [k, v] = [0, 1].map(|_| TensorView::host(&rows, &dims));
        step.write(layer, k, v, Axes::Thd)?;
    }
    Ok(())
}

/// Runs one query in a layer, with a full mask or within a window.
fn attend(
    cache: &mut KvCache<NullBackend>,
    id: SequenceId,
    layer: u16,
    left: Option<u32>,
) -> Result<(), CacheError> {
    let mut step = cache.begin_step(&[StepInput::query(id, 1)])?;
    let (q, mut out) = ([0.0_f32; 2], [0.0_f32; 2]);
    let out = TensorViewMut::host(&mut out, &[1, 1, 2]);
    let options = AttentionOptions::causal(1.0);
    let options = left.map_or(options, |left| options.with_window_left(left));
    step.attend(layer, TensorView::host(&q, &[1, 1, 2]), out, &options)
}

fn lacks(refused: Result<(), CacheError>, tokens: u32) {
    let expected = PlanError::RowsUnwritten { layer: LayerId(1), sequence: SEQ[0], tokens };
    assert_eq!(refused.map_err(|error| error.to_string()), Err(expected.to_string()));
}

#[test]
fn nothing_is_reused_that_a_late_layer_lacks() {
    let mut cache = lazy();
    assert!(cache.allocate_layer(0).unwrap());
    let options = StartOptions::default();
    assert_eq!(cache.start(SEQ[0], &PROMPT, options).unwrap(), 0);
    append_prompt(&mut cache, SEQ[0], &PROMPT, 1).unwrap();
    cache.release(SEQ[0]).unwrap();
    assert_eq!(cache.state().probe(&PROMPT, options), 8);
    assert!(!cache.allocate_layer(0).unwrap());
    assert_eq!(cache.state().probe(&PROMPT, options), 8, "no layer came");
    cache.take_events();
    assert!(cache.allocate_layer(1).unwrap());
    assert_eq!(cache.state().probe(&PROMPT, options), 0);
    assert!(!cache.take_events().is_empty(), "subscribers are told");
    assert_eq!(cache.start(SEQ[1], &PROMPT, options).unwrap(), 0);
    append_prompt(&mut cache, SEQ[1], &PROMPT, 2).unwrap();
    attend(&mut cache, SEQ[1], 1, None).unwrap();
    assert_eq!(cache.state().probe(&PROMPT, options), 8, "what all layers have is found");
    check_invariants(cache.state());
}

#[test]
fn pinned_and_held_prefixes_are_not_reused_in_a_late_layer() {
    let mut cache = lazy();
    cache.allocate_layer(0).unwrap();
    let options = StartOptions::default();
    cache.start(SEQ[0], &PROMPT, options).unwrap();
    append_prompt(&mut cache, SEQ[0], &PROMPT, 1).unwrap();
    let pin = cache.pin_prefix(&PROMPT[..4], options);
    cache.allocate_layer(1).unwrap();
    assert_eq!(cache.state().probe(&PROMPT, options), 0);
    // These blocks have no whole prefix before them: they are not published.
    append_prompt(&mut cache, SEQ[0], &[10, 11, 12, 13], 2).unwrap();
    cache.release(SEQ[0]).unwrap();
    let longer = [PROMPT.as_slice(), &[10, 11, 12, 13]].concat();
    assert_eq!(cache.state().probe(&longer, options), 0);
    assert!(cache.unpin(pin.id).unwrap());
    check_invariants(cache.state());
}

#[test]
fn rows_that_a_late_layer_lacks_are_refused() {
    let mut cache = lazy();
    cache.allocate_layer(0).unwrap();
    cache.start(SEQ[0], &PROMPT, StartOptions::default()).unwrap();
    append_prompt(&mut cache, SEQ[0], &PROMPT, 1).unwrap();
    cache.allocate_layer(1).unwrap();
    attend(&mut cache, SEQ[0], 0, None).unwrap();
    lacks(attend(&mut cache, SEQ[0], 1, None), 9);
    append_prompt(&mut cache, SEQ[0], &[10, 11, 12], 2).unwrap();
    lacks(attend(&mut cache, SEQ[0], 1, Some(3)), 9);
    attend(&mut cache, SEQ[0], 1, Some(2)).unwrap();
    let gather = |cache: &mut KvCache<NullBackend>, begin| {
        let mut out = [0.0_f32; 2];
        let out = TensorViewMut::host(&mut out, &[1, 1, 2]);
        cache.gather(1, Plane::Value, &[(SEQ[0], begin, 1)], out, Axes::Thd)
    };
    lacks(gather(&mut cache, 8), 9);
    gather(&mut cache, 9).unwrap();
    // A fork lacks the rows too, and truncated tokens that are added again are complete.
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    assert!(attend(&mut cache, SEQ[1], 1, None).is_err());
    cache.truncate(SEQ[0], 4).unwrap();
    lacks(attend(&mut cache, SEQ[0], 1, None), 4);
    cache.truncate(SEQ[0], 0).unwrap();
    append_prompt(&mut cache, SEQ[0], &PROMPT, 2).unwrap();
    attend(&mut cache, SEQ[0], 1, None).unwrap();
    // A new sequence in the same row lacks nothing.
    cache.release(SEQ[1]).unwrap();
    cache.start(SEQ[1], &[], StartOptions::default()).unwrap();
    append_prompt(&mut cache, SEQ[1], &PROMPT, 2).unwrap();
    attend(&mut cache, SEQ[1], 1, None).unwrap();
}

#[test]
fn a_sequence_without_tokens_lacks_nothing() {
    let mut cache = lazy();
    cache.start(SEQ[0], &PROMPT, StartOptions::default()).unwrap();
    for layer in 0..3_u16 {
        cache.allocate_layer(layer).unwrap();
    }
    append_prompt(&mut cache, SEQ[0], &PROMPT, 3).unwrap();
    attend(&mut cache, SEQ[0], 2, None).unwrap();
    assert_eq!(cache.state().probe(&PROMPT, StartOptions::default()), 8);
}

/// Reads the whole batch of a step with one query.
fn gather_batch(cache: &mut KvCache<NullBackend>, layer: u16) -> Result<(), CacheError> {
    let mut step = cache.begin_step(&[StepInput::query(SEQ[0], 1)])?;
    let mut rows = [0.0_f32; 9 * 2];
    let out = TensorViewMut::host(&mut rows, &[9, 1, 2]);
    step.gather(layer, Plane::Key, out, Axes::Thd)
}

#[test]
fn rows_of_a_late_layer_are_zeros_where_the_spec_says_so() {
    for late_layers in [LateLayers::Refuse, LateLayers::Zeros] {
        let mut cache = lazy_with(late_layers);
        assert_eq!(cache.state().spec().late_layers(), late_layers);
        cache.allocate_layer(0).unwrap();
        cache.start(SEQ[0], &PROMPT, StartOptions::default()).unwrap();
        append_prompt(&mut cache, SEQ[0], &PROMPT, 1).unwrap();
        cache.allocate_layer(1).unwrap();
        gather_batch(&mut cache, 0).unwrap();
        let mut rows = [0.0_f32; 9 * 2];
        let out = TensorViewMut::host(&mut rows, &[9, 1, 2]);
        let gathered = cache.gather(1, Plane::Key, &[(SEQ[0], 0, 9)], out, Axes::Thd);
        let reads = [attend(&mut cache, SEQ[0], 1, None), gather_batch(&mut cache, 1), gathered];
        for read in reads {
            match late_layers {
                LateLayers::Refuse => lacks(read, 9),
                LateLayers::Zeros => read.unwrap(),
            }
        }
        assert_eq!(cache.state().probe(&PROMPT, StartOptions::default()), 0, "nothing is reused");
    }
}
