//! The slot style: ids, limits, lengths, memory figures.
use kv_compat::{KvCacheManager, SlotConfig};
use kv_core::backend::NullBackend;
use kv_core::error::PlanError;
use kv_core::{
    AttentionOptions, CacheError, KvFormat, LayerId, ScaleGroup, Scaling, SequenceId, TensorView,
    TensorViewMut,
};

use crate::params::refusal;

type Slots = KvCacheManager<NullBackend>;

const CONFIG: SlotConfig = SlotConfig {
    num_layers: 3,
    num_kv_heads: 2,
    head_dim: 4,
    max_seq_len: 16,
    max_batch_size: 2,
    format: KvFormat::F16,
};

fn slots() -> Slots {
    KvCacheManager::new(NullBackend::new(), CONFIG).unwrap()
}

fn append(cache: &mut Slots, sequence: SequenceId, layer: u16, n: u32) -> Result<(), CacheError> {
    let rows = vec![0.0_f32; n as usize * 8];
    let view = TensorView::host(&rows, &[n, 2, 4]);
    cache.append_kv(sequence, layer, view, view, n)
}

fn append_all(cache: &mut Slots, sequence: SequenceId, n: u32) {
    for layer in 0..3 {
        append(cache, sequence, layer, n).unwrap();
    }
}

#[test]
fn every_setting_must_be_at_least_one() {
    for config in [
        SlotConfig { num_layers: 0, ..CONFIG },
        SlotConfig { num_kv_heads: 0, ..CONFIG },
        SlotConfig { head_dim: 0, ..CONFIG },
        SlotConfig { max_seq_len: 0, ..CONFIG },
        SlotConfig { max_batch_size: 0, ..CONFIG },
        SlotConfig { max_seq_len: u32::MAX, max_batch_size: u32::MAX, ..CONFIG },
    ] {
        let refused = KvCacheManager::new(NullBackend::new(), config);
        assert!(matches!(refused, Err(CacheError::Spec(_))), "{config:?}: {refused:?}");
    }
}

#[test]
fn memory_is_counted_in_slots() {
    let mut cache = slots();
    let slot = 3 * 2 * 16 * 2 * 4 * 2;
    assert_eq!((cache.slot_bytes(), cache.total_bytes()), (slot, 2 * slot));
    assert_eq!((cache.used_bytes(), cache.free_bytes()), (0, 2 * slot));
    let seq = cache.allocate_sequence(1).unwrap();
    assert_eq!((cache.used_bytes(), cache.free_bytes()), (slot, slot));
    assert_eq!((cache.active_sequences(), cache.max_sequences()), (1, 2));
    cache.release_sequence(seq).unwrap();
    assert_eq!((cache.used_bytes(), cache.active_sequences()), (0, 0));
}

#[test]
fn the_7b_model_of_the_original_takes_two_gib() {
    let config = SlotConfig {
        num_layers: 32,
        num_kv_heads: 32,
        head_dim: 128,
        max_seq_len: 4096,
        max_batch_size: 1,
        format: KvFormat::F16,
    };
    let cache = KvCacheManager::new(NullBackend::new(), config).unwrap();
    assert_eq!(cache.total_bytes(), 2 << 30);
}

#[test]
fn ids_ascend_and_are_never_used_again() {
    let mut cache = slots();
    let first = cache.allocate_sequence(4).unwrap();
    let second = cache.allocate_sequence(4).unwrap();
    cache.release_sequence(first).unwrap();
    let third = cache.allocate_sequence(4).unwrap();
    assert!(first < second && second < third);
    assert_eq!(cache.seq_len(first), None);
    assert_eq!(cache.seq_len(third), Some(0));
}

#[test]
fn allocation_is_refused_with_the_reason() {
    let mut cache = slots();
    let error = refusal(cache.allocate_sequence(0));
    assert!(matches!(error, PlanError::Option { option: "max_len", .. }));
    let error = refusal(cache.allocate_sequence(17));
    assert_eq!(error, PlanError::TooMany { what: "tokens of a sequence", got: 17, max: 16 });
    let ids = [1, 16].map(|len| cache.allocate_sequence(len).unwrap());
    assert_eq!(refusal(cache.allocate_sequence(1)), PlanError::NoFreeSlot { used: 2, total: 2 });
    cache.release_sequence(ids[0]).unwrap();
    let sequence = ids[0];
    let unknown = PlanError::UnknownSequence { sequence };
    assert_eq!(cache.release_sequence(sequence), Err(unknown), "a second release");
    cache.allocate_sequence(1).unwrap();
}

#[test]
fn appending_is_refused_with_the_reason() {
    let mut cache = slots();
    let seq = cache.allocate_sequence(5).unwrap();
    let unknown = SequenceId(99);
    let error = refusal(append(&mut cache, unknown, 0, 1));
    assert_eq!(error, PlanError::UnknownSequence { sequence: unknown });
    let layer = LayerId(3);
    let error = refusal(append(&mut cache, seq, 3, 1));
    assert_eq!(error, PlanError::UnknownLayer { layer, num_layers: 3 });
    assert_eq!(refusal(append(&mut cache, seq, 0, 0)), PlanError::ZeroTokens { sequence: seq });
    let too_long = PlanError::SequenceTooLong { sequence: seq, len: 0, new: 6, max: 5 };
    assert_eq!(refusal(append(&mut cache, seq, 0, 6)), too_long);
    let rows = [0.0_f32; 16];
    let view = TensorView::host(&rows, &[2, 2, 4]);
    let few = refusal(cache.append_kv(seq, 0, view, view, 3));
    assert!(matches!(few, PlanError::Shape { .. }));
    let error = refusal(cache.append_kv(seq, 0, view, view, u32::MAX));
    assert!(matches!(error, PlanError::SequenceTooLong { .. }));
    append_all(&mut cache, seq, 5);
    cache.advance_seq_len(seq, 5).unwrap();
    let full = PlanError::SequenceTooLong { sequence: seq, len: 5, new: 1, max: 5 };
    assert_eq!(refusal(append(&mut cache, seq, 0, 1)), full);
}

#[test]
fn an_advance_wants_rows_in_every_layer() {
    let mut cache = slots();
    let seq = cache.allocate_sequence(8).unwrap();
    assert_eq!(refusal(cache.advance_seq_len(seq, 0)), PlanError::ZeroTokens { sequence: seq });
    let unknown = SequenceId(99);
    let error = refusal(cache.advance_seq_len(unknown, 1));
    assert_eq!(error, PlanError::UnknownSequence { sequence: unknown });
    for past in [9, u32::MAX] {
        let error = refusal(cache.advance_seq_len(seq, past));
        assert!(matches!(error, PlanError::SequenceTooLong { max: 8, .. }));
    }
    let missing = |layer, others| PlanError::LayersUnwritten { layer: LayerId(layer), others };
    assert_eq!(refusal(cache.advance_seq_len(seq, 2)), missing(0, 2));
    append(&mut cache, seq, 2, 3).unwrap();
    append(&mut cache, seq, 0, 1).unwrap();
    assert_eq!(refusal(cache.advance_seq_len(seq, 2)), missing(0, 1));
    append(&mut cache, seq, 0, 2).unwrap();
    append(&mut cache, seq, 1, 2).unwrap();
    cache.advance_seq_len(seq, 2).unwrap();
    // One row is left in layer 2; the others have none.
    assert_eq!(refusal(cache.advance_seq_len(seq, 1)), missing(0, 1));
    assert_eq!(cache.seq_len(seq), Some(2));
}

#[test]
fn rows_may_be_taken_one_by_one_and_appended_again() {
    let mut cache = slots();
    let seq = cache.allocate_sequence(8).unwrap();
    append_all(&mut cache, seq, 4);
    append_all(&mut cache, seq, 4); // a pass repeated
    cache.advance_seq_len(seq, 3).unwrap();
    cache.advance_seq_len(seq, 1).unwrap();
    assert!(cache.advance_seq_len(seq, 1).is_err());
    append_all(&mut cache, seq, 4);
    cache.advance_seq_len(seq, 4).unwrap();
    assert_eq!(cache.seq_len(seq), Some(8));
}

#[test]
fn rows_appended_before_a_release_are_not_the_next_sequences() {
    let mut cache = slots();
    let first = cache.allocate_sequence(8).unwrap();
    append_all(&mut cache, first, 4);
    cache.release_sequence(first).unwrap();
    let second = cache.allocate_sequence(8).unwrap();
    assert!(cache.advance_seq_len(second, 1).is_err());
}

#[test]
fn rows_that_the_device_failed_to_write_do_not_count() {
    let backend = NullBackend::new();
    let control = backend.control();
    let mut cache = KvCacheManager::new(backend, CONFIG).unwrap();
    let seq = cache.allocate_sequence(8).unwrap();
    append_all(&mut cache, seq, 2);
    control.fail_after(0);
    assert!(matches!(append(&mut cache, seq, 1, 1), Err(CacheError::Device(_))));
    let missing = PlanError::LayersUnwritten { layer: LayerId(1), others: 0 };
    assert_eq!(refusal(cache.advance_seq_len(seq, 1)), missing);
    append(&mut cache, seq, 1, 2).unwrap();
    control.fail_after(0);
    assert!(cache.advance_seq_len(seq, 2).is_err());
    assert_eq!(cache.seq_len(seq), Some(0));
    cache.advance_seq_len(seq, 2).unwrap();
}

#[test]
fn a_release_needs_no_device() {
    let backend = NullBackend::new();
    let control = backend.control();
    let mut cache = KvCacheManager::new(backend, CONFIG).unwrap();
    let [seq, other] = [8, 8].map(|len| cache.allocate_sequence(len).unwrap());
    append_all(&mut cache, seq, 2);
    let (slot, recorded) = (cache.cache(seq, 0).unwrap().slot, control.recorded());
    control.fail_after(0);
    cache.release_sequence(seq).unwrap();
    assert_eq!(control.recorded(), recorded);
    assert_eq!((cache.seq_len(seq), cache.active_sequences()), (None, 1));
    let next = cache.allocate_sequence(8).unwrap();
    assert_eq!(cache.cache(next, 0).unwrap().slot, slot, "the slot serves the next sequence");
    assert_eq!(cache.seq_len(other), Some(0));
    assert!(append(&mut cache, next, 0, 1).is_err(), "the failure was still to come");
    append_all(&mut cache, next, 1);
    cache.advance_seq_len(next, 1).unwrap();
}

#[test]
fn quantised_formats_are_stored_unless_they_need_a_calibration() {
    for (format, is_stored) in [
        (KvFormat::Int8(Scaling::Row), true),
        (KvFormat::L4(ScaleGroup::Row), true),
        (KvFormat::Fp8E4m3(Scaling::Tensor), false),
    ] {
        let opened =
            KvCacheManager::new(NullBackend::new(), SlotConfig { head_dim: 32, format, ..CONFIG });
        match opened {
            Ok(_) => assert!(is_stored, "{format}"),
            Err(error) => {
                let is_calibration = matches!(error, CacheError::Calibration(_));
                assert!(is_calibration && !is_stored, "{format}: {error}");
            }
        }
    }
}

#[test]
fn a_view_names_the_slot() {
    let mut cache = slots();
    let [a, b] = [3, 4].map(|len| cache.allocate_sequence(len).unwrap());
    append_all(&mut cache, a, 2);
    cache.advance_seq_len(a, 2).unwrap();
    let (view, other) = (cache.cache(a, 2).unwrap(), cache.cache(b, 2).unwrap());
    assert_eq!((view.len, view.max_len), (2, 3));
    assert_ne!(view.slot, other.slot);
    assert_eq!(view.k.layout().block_size(), 16);
    let sequence = SequenceId(9);
    assert_eq!(cache.cache(sequence, 0).unwrap_err(), PlanError::UnknownSequence { sequence });
    let (layer, num_layers) = (LayerId(3), 3);
    assert_eq!(cache.cache(a, 3).unwrap_err(), PlanError::UnknownLayer { layer, num_layers });
}

#[test]
fn attention_takes_any_batch_of_live_sequences() {
    let mut cache = slots();
    let [a, b] = [8, 8].map(|len| cache.allocate_sequence(len).unwrap());
    append_all(&mut cache, a, 2);
    append(&mut cache, b, 0, 1).unwrap();
    let q = [0.0_f32; 3 * 8];
    let mut values = [0.0_f32; 3 * 8];
    let options = AttentionOptions::causal(0.5);
    let mut attend = |layer: u16, batch: &[(SequenceId, u32)], heads: u32| {
        let q = TensorView::host(&q, &[3, heads, 4]);
        let out = TensorViewMut::host(&mut values, &[3, heads, 4]);
        cache.attend(layer, batch, q, out, &options)
    };
    attend(0, &[(b, 1), (a, 2)], 2).unwrap();
    let sequence = SequenceId(9);
    assert_eq!(refusal(attend(0, &[(sequence, 1)], 2)), PlanError::UnknownSequence { sequence });
    assert_eq!(refusal(attend(0, &[(a, 0)], 2)), PlanError::ZeroTokens { sequence: a });
    assert!(matches!(refusal(attend(3, &[(a, 1)], 2)), PlanError::UnknownLayer { .. }));
    assert!(matches!(refusal(attend(0, &[(a, 4)], 2)), PlanError::Shape { .. }));
    assert!(matches!(refusal(attend(0, &[(a, 1)], 1)), PlanError::HeadsNotDivisible { .. }));
}

/// Each count that a caller gives is within a bound of the cache, or refused.
#[test]
fn counts_of_a_slot_cache_are_bounded_by_its_slots() {
    let config = SlotConfig {
        num_layers: 1,
        num_kv_heads: 1,
        head_dim: 2,
        max_seq_len: 8,
        max_batch_size: 2,
        format: KvFormat::F32,
    };
    let mut cache = KvCacheManager::new(NullBackend::new(), config).unwrap();
    let rows = [0.0_f32; 9 * 2];
    for (n, is_refused) in [(0, true), (1, false), (8, false), (9, true), (u32::MAX, true)] {
        let taken = cache.allocate_sequence(n);
        assert_eq!(taken.is_err(), is_refused, "{n} tokens of a sequence");
        if let Ok(sequence) = taken {
            cache.release_sequence(sequence).unwrap();
        }
        let sequence = cache.allocate_sequence(8).unwrap();
        let view = TensorView::host(&rows, &[9, 1, 2]);
        let written = cache.append_kv(sequence, 0, view, view, n);
        assert_eq!(written.is_err(), is_refused, "{n} rows");
        assert_eq!(cache.advance_seq_len(sequence, n).is_err(), is_refused, "{n} tokens");
        cache.release_sequence(sequence).unwrap();
    }
    let sequence = cache.allocate_sequence(8).unwrap();
    let mut out = rows;
    let view = TensorView::host(&rows, &[9, 1, 2]);
    for (n, is_refused) in [(0, true), (1, false), (9, false), (65_537, true), (u32::MAX, true)] {
        let out = TensorViewMut::host(&mut out, &[9, 1, 2]);
        let attended = cache.attend(0, &[(sequence, n)], view, out, &AttentionOptions::full(1.0));
        assert_eq!(attended.is_err(), is_refused, "{n} queries");
    }
}
