//! Inconsistent geometries are refused when they are built.
use kv_format::{KvFormat, ScaleGroup};

use super::*;
use crate::error::SpecError;

fn builder() -> CacheSpecBuilder {
    CacheSpec::builder().layers(2).kv_heads(2).head_dim(4).format(KvFormat::F32).paged(4, 8)
}

#[test]
fn names_what_is_missing() {
    for (builder, text) in [
        (CacheSpec::builder(), "layers is not set"),
        (CacheSpec::builder().layers(1), "paged or contiguous is not set"),
        (CacheSpec::builder().layers(1).paged(1, 1), "kv_heads is not set"),
        (CacheSpec::builder().layers(1).paged(1, 1).kv_heads(1), "head_dim is not set"),
    ] {
        assert_eq!(builder.build().unwrap_err().to_string(), text);
    }
}

#[test]
fn refuses_zeros() {
    for (builder, field) in [
        (builder().layers(0), "layers"),
        (builder().kv_heads(0), "num_kv_heads"),
        (builder().head_dims(4, 0), "head_dim"),
        (builder().paged(0, 8), "block_size"),
        (builder().paged(4, 0), "num_blocks"),
        (builder().paged_within(4, 1), "num_blocks"),
        (builder().paged_within(0, 1), "block_size"),
        (builder().contiguous(0, 8), "max_sequences"),
        (builder().contiguous(8, 0), "max_seq_len"),
        (builder().max_seq_len(0), "max_seq_len"),
        (builder().max_sequences(0), "max_sequences"),
    ] {
        assert_eq!(builder.build(), Err(SpecError::Zero { field }));
    }
}

#[test]
fn refuses_what_overflows() {
    for builder in [
        builder().paged(1 << 16, 1 << 16),
        builder().kv_heads(u32::MAX).head_dim(u32::MAX),
        builder().paged(2, u32::MAX / 2).kv_heads(1 << 16).head_dim(1 << 16),
        builder().layers(u16::MAX).paged(2, u32::MAX / 2).kv_heads(1 << 12).head_dim(1 << 12),
    ] {
        let refused = builder.build();
        assert!(matches!(refused, Err(SpecError::Overflow { .. })), "{refused:?}");
    }
}

#[test]
fn refuses_more_blocks_than_their_numbers_have_bits_for() {
    let max = (1 << 31) - 1;
    assert!(builder().paged(1, max).build().is_ok());
    let refused = builder().paged(1, max + 1).build();
    let too_large = |got, max| SpecError::TooLarge { field: "num_blocks", got, max };
    assert_eq!(refused, Err(too_large(1 << 31, (1 << 31) - 1)));
}

#[test]
fn refuses_constants_whose_bytes_overflow() {
    // 3 bits for a value: the plane fits, its constants do not.
    let group = builder()
        .paged(1, 1)
        .format(KvFormat::L3(ScaleGroup::Row))
        .kv_heads(1 << 31)
        .head_dim(1 << 30);
    assert!(matches!(group.build(), Err(SpecError::Overflow { .. })));
}

#[test]
fn a_budget_buys_whole_blocks() {
    // 2 layers * (K + V) * 4 tokens * 2 heads * 4 values * 4 bytes = 512 bytes a block.
    let spec = builder().paged_within(4, 1535).build().unwrap();
    assert_eq!(spec.groups()[0].num_blocks(), 2);
    assert_eq!(spec.memory().bytes_total, 1024);
    assert_eq!(spec.memory().bytes_per_token, 128);
    assert_eq!(spec.sequences_that_fit(4), 2);
    assert_eq!(spec.sequences_that_fit(5), 1);
    assert_eq!(spec.sequences_that_fit(9), 0);
}

#[test]
fn contiguous_is_paged_with_one_block_a_sequence() {
    let spec = builder().contiguous(3, 10).build().unwrap();
    let [group] = spec.groups() else { panic!("one group") };
    assert_eq!((group.block_size(), group.num_blocks(), group.is_contiguous()), (10, 3, true));
    assert_eq!((spec.max_sequences(), spec.max_seq_len()), (3, 10));
    assert_eq!(spec.sequences_that_fit(10), 3);
}

#[test]
fn every_layer_is_in_one_group() {
    let spec = builder().layers(5).group([3, 1], |g| g.paged(8, 2)).build().unwrap();
    let layers: Vec<_> = spec.groups().iter().map(|g| g.layers().to_vec()).collect();
    assert_eq!(layers, [vec![LayerId(0), LayerId(2), LayerId(4)], vec![LayerId(1), LayerId(3)]]);
    assert_eq!(spec.locate(LayerId(3)), Some((GroupId(1), 1)));
    assert_eq!(spec.locate(LayerId(5)), None);
    assert_eq!(spec.max_seq_len(), 16, "the smaller pool limits a sequence");

    let twice = builder().group([1], |g| g).group([1, 0], |g| g).build();
    assert_eq!(twice, Err(SpecError::LayerGroups { layer: LayerId(1), groups: 2 }));
    let beyond = builder().group([2], |g| g).build();
    assert_eq!(beyond, Err(SpecError::LayerOutOfRange { layer: LayerId(2), num_layers: 2 }));
    let all = builder().group([0, 1], |g| g.head_dim(8)).build().unwrap();
    assert_eq!(all.groups().len(), 1);
}

#[test]
fn zeros_of_late_layers_need_plain_formats() {
    let int8 = KvFormat::Int8(crate::Scaling::Row);
    let lazy = || CacheSpec::builder().layers_on_demand().kv_heads(2).head_dim(32).paged(4, 8);
    assert_eq!(lazy().build().unwrap().late_layers(), LateLayers::Refuse);
    for format in KvFormat::PLAIN {
        let spec = lazy().format(*format).late_layers(LateLayers::Zeros).build().unwrap();
        assert_eq!(spec.late_layers(), LateLayers::Zeros);
    }
    for (k, v) in [(int8, int8), (KvFormat::F16, int8), (int8, KvFormat::F16)] {
        lazy().formats(k, v).build().unwrap();
        let refused = lazy().formats(k, v).late_layers(LateLayers::Zeros).build().unwrap_err();
        let words = "late_layers: zeros need rows of f32, f16 or bf16, not of int8";
        assert_eq!(refused.to_string(), words);
    }
}
