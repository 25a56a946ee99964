//! Reading the batch of an open step.
use super::*;
use crate::backend::Plane;
use crate::{KvFormat, Scaling};

/// Reads keys of a layer into `[t, 1, 2]`.
fn gather(step: &mut Step<'_, NullBackend>, layer: u16, t: u32) -> Result<(), CacheError> {
    let mut rows = vec![0.0_f32; usize::try_from(t).unwrap() * 2];
    let out = TensorViewMut::host(&mut rows, &[t, 1, 2]);
    step.gather(layer, Plane::Key, out, Axes::Thd)
}

fn refusal(gathered: Result<(), CacheError>) -> PlanError {
    match gathered {
        Err(CacheError::Plan(error)) => error,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[test]
fn every_entry_is_read_with_the_tokens_of_this_step() {
    let mut cache = cache(4, 8);
    for sequence in SEQ {
        start(&mut cache, sequence);
    }
    append(&mut cache, &[(SEQ[0], 5), (SEQ[1], 2)]).unwrap();
    let before = cache.backend().control().recorded();
    let inputs = [
        StepInput::count(SEQ[2], 1),
        StepInput::query(SEQ[1], 1),
        StepInput::idle(SEQ[3]),
        StepInput::count(SEQ[0], 3),
    ];
    let mut step = cache.begin_step(&inputs).unwrap();
    write_all(&mut step).unwrap();
    // 1 + 2 + 0 + 8 rows.
    gather(&mut step, 0, 11).unwrap();
    gather(&mut step, 1, 12).unwrap();
    assert!(matches!(refusal(gather(&mut step, 0, 10)), PlanError::Shape { .. }));
    for (s, fits) in [(7, false), (8, true)] {
        let mut rows = vec![0.0_f32; 4 * 8 * 2];
        let out = TensorViewMut::host(&mut rows, &[4, s, 1, 2]);
        let gathered = step.gather(0, Plane::Value, out, Axes::Bshd);
        assert_eq!(gathered.is_ok(), fits, "{s}");
    }
    step.commit().unwrap();
    assert_eq!(cache.state().seq_len(SEQ[0]), Some(8));
    assert!(cache.backend().control().recorded() > before);
}

#[test]
fn a_layer_is_read_after_it_is_written() {
    let mut cache = cache(4, 8);
    start(&mut cache, SEQ[0]);
    let mut step = cache.begin_step(&[StepInput::count(SEQ[0], 3)]).unwrap();
    let layer = LayerId(0);
    assert_eq!(refusal(gather(&mut step, 0, 3)), PlanError::AttendBeforeWrite { layer });
    let (layer, num_layers) = (LayerId(2), 2);
    assert_eq!(refusal(gather(&mut step, 2, 3)), PlanError::UnknownLayer { layer, num_layers });
    let unwritten = |layer, others| PlanError::LayersUnwritten { layer: LayerId(layer), others };
    assert_eq!(step.check_written(), Err(unwritten(0, 1)));
    let rows = TensorView::host(&[0.0_f32; 6], &[3, 1, 2]);
    step.write(0, rows, rows, Axes::Thd).unwrap();
    assert_eq!(step.check_written(), Err(unwritten(1, 0)));
    gather(&mut step, 0, 3).unwrap();
    step.write(1, rows, rows, Axes::Thd).unwrap();
    step.check_written().unwrap();
    step.commit().unwrap();
    let step = cache.begin_step(&[StepInput::query(SEQ[0], 1)]).unwrap();
    assert_eq!(step.check_written(), Ok(()), "no tokens, nothing to write");
}

#[test]
fn a_layer_without_memory_is_not_read() {
    let spec = CacheSpec::builder().layers_on_demand().kv_heads(1).head_dim(2).paged(4, 8);
    let mut cache = KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap();
    start(&mut cache, SEQ[0]);
    let mut step = cache.begin_step(&[StepInput::count(SEQ[0], 3)]).unwrap();
    let layer = LayerId(4);
    assert_eq!(refusal(gather(&mut step, 4, 3)), PlanError::LayerUnallocated { layer });
}

#[test]
fn rows_that_left_a_window_are_not_read() {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(2).paged(4, 8);
    let spec = spec.window_left(3).build().unwrap();
    let mut cache = KvCache::new(NullBackend::new(), spec).unwrap();
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 4)]).unwrap();
    for (tokens, kept) in [(3, None), (2, Some(4))] {
        let mut step = cache.begin_step(&[StepInput::count(SEQ[0], tokens)]).unwrap();
        write_all(&mut step).unwrap();
        let len = step.sequences()[0].kv_len;
        let gathered = gather(&mut step, 0, len);
        step.commit().unwrap();
        match kept {
            None => gathered.unwrap(),
            Some(kept) => {
                let sequence = SEQ[0];
                let gone = PlanError::OutOfWindow { sequence, asked: 0, kept };
                assert_eq!(refusal(gathered), gone);
            }
        }
    }
}

#[test]
fn a_tail_is_read_after_the_step() {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(32).paged(4, 8);
    let spec = spec.format(KvFormat::Int8(Scaling::Row)).tail(true).build().unwrap();
    let mut cache = KvCache::new(NullBackend::new(), spec).unwrap();
    start(&mut cache, SEQ[0]);
    let mut step = cache.begin_step(&[StepInput::count(SEQ[0], 1)]).unwrap();
    let row = TensorView::host(&[0.0_f32; 32], &[1, 1, 32]);
    step.write(0, row, row, Axes::Thd).unwrap();
    let mut rows = [0.0_f32; 32];
    let out = TensorViewMut::host(&mut rows, &[1, 1, 32]);
    let refused = refusal(step.gather(0, Plane::Key, out, Axes::Thd));
    assert!(matches!(refused, PlanError::State { operation: "gather", .. }), "{refused}");
    step.commit().unwrap();
    let out = TensorViewMut::host(&mut rows, &[1, 1, 32]);
    cache.gather(0, Plane::Key, &[(SEQ[0], 0, 1)], out, Axes::Thd).unwrap();
}
