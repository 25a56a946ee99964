//! Layers that get memory when tokens are cached already.
use super::*;
use crate::Plane;

const PROMPT: [u32; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];

fn lazy() -> KvCache<NullBackend> {
    let spec = CacheSpec::builder().layers_on_demand().kv_heads(1).head_dim(2).paged(4, 12);
    KvCache::new(NullBackend::new(), spec.events(16).build().unwrap()).unwrap()
}

/// Brings what of a prompt is not cached, to `layers` layers.
fn bring(
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
        step.write(layer, k, v, QkvFormat::Thd)?;
    }
    Ok(())
}

/// One query in a layer, over everything or within a window.
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
    bring(&mut cache, SEQ[0], &PROMPT, 1).unwrap();
    cache.release(SEQ[0]).unwrap();
    assert_eq!(cache.probe(&PROMPT, options), 8);
    assert!(!cache.allocate_layer(0).unwrap());
    assert_eq!(cache.probe(&PROMPT, options), 8, "no layer came");
    cache.take_events();
    assert!(cache.allocate_layer(1).unwrap());
    assert_eq!(cache.probe(&PROMPT, options), 0);
    assert!(!cache.take_events().is_empty(), "those who follow the events know");
    assert_eq!(cache.start(SEQ[1], &PROMPT, options).unwrap(), 0);
    bring(&mut cache, SEQ[1], &PROMPT, 2).unwrap();
    attend(&mut cache, SEQ[1], 1, None).unwrap();
    assert_eq!(cache.probe(&PROMPT, options), 8, "what all layers have is found");
    check_invariants(&cache);
}

#[test]
fn pinned_and_held_prefixes_are_not_reused_in_a_late_layer() {
    let mut cache = lazy();
    cache.allocate_layer(0).unwrap();
    let options = StartOptions::default();
    cache.start(SEQ[0], &PROMPT, options).unwrap();
    bring(&mut cache, SEQ[0], &PROMPT, 1).unwrap();
    let pin = cache.pin_prefix(&PROMPT[..4], options);
    cache.allocate_layer(1).unwrap();
    assert_eq!(cache.probe(&PROMPT, options), 0);
    // What the sequence brings now has no whole prefix behind it: it is not offered.
    bring(&mut cache, SEQ[0], &[10, 11, 12, 13], 2).unwrap();
    cache.release(SEQ[0]).unwrap();
    let longer = [PROMPT.as_slice(), &[10, 11, 12, 13]].concat();
    assert_eq!(cache.probe(&longer, options), 0);
    assert!(cache.unpin(pin.id).unwrap());
    check_invariants(&cache);
}

#[test]
fn rows_that_a_late_layer_lacks_are_refused() {
    let mut cache = lazy();
    cache.allocate_layer(0).unwrap();
    cache.start(SEQ[0], &PROMPT, StartOptions::default()).unwrap();
    bring(&mut cache, SEQ[0], &PROMPT, 1).unwrap();
    cache.allocate_layer(1).unwrap();
    attend(&mut cache, SEQ[0], 0, None).unwrap();
    lacks(attend(&mut cache, SEQ[0], 1, None), 9);
    bring(&mut cache, SEQ[0], &[10, 11, 12], 2).unwrap();
    lacks(attend(&mut cache, SEQ[0], 1, Some(3)), 9);
    attend(&mut cache, SEQ[0], 1, Some(2)).unwrap();
    let gather = |cache: &mut KvCache<NullBackend>, begin| {
        let mut out = [0.0_f32; 2];
        let out = TensorViewMut::host(&mut out, &[1, 1, 2]);
        cache.gather(1, Plane::Value, &[(SEQ[0], begin, 1)], out, QkvFormat::Thd)
    };
    lacks(gather(&mut cache, 8), 9);
    gather(&mut cache, 9).unwrap();
    // A fork lacks them too, and what is cut and brought anew is there.
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    assert!(attend(&mut cache, SEQ[1], 1, None).is_err());
    cache.truncate(SEQ[0], 4).unwrap();
    lacks(attend(&mut cache, SEQ[0], 1, None), 4);
    cache.truncate(SEQ[0], 0).unwrap();
    bring(&mut cache, SEQ[0], &PROMPT, 2).unwrap();
    attend(&mut cache, SEQ[0], 1, None).unwrap();
    // A new sequence in the same row lacks nothing.
    cache.release(SEQ[1]).unwrap();
    cache.start(SEQ[1], &[], StartOptions::default()).unwrap();
    bring(&mut cache, SEQ[1], &PROMPT, 2).unwrap();
    attend(&mut cache, SEQ[1], 1, None).unwrap();
}

#[test]
fn a_sequence_without_tokens_lacks_nothing() {
    let mut cache = lazy();
    cache.start(SEQ[0], &PROMPT, StartOptions::default()).unwrap();
    for layer in 0..3_u16 {
        cache.allocate_layer(layer).unwrap();
    }
    bring(&mut cache, SEQ[0], &PROMPT, 3).unwrap();
    attend(&mut cache, SEQ[0], 2, None).unwrap();
    assert_eq!(cache.probe(&PROMPT, StartOptions::default()), 8);
}
