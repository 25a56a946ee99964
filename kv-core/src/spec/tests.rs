//! Inconsistent geometries are refused when they are built.
use kv_format::{DType, KvFormat, ScaleGroup};

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
fn layers_have_rows_a_state_or_both() {
    let states = |layers: &'static [u16]| {
        let spec = CacheSpec::builder().layers(6).kv_heads(2).head_dim(4).paged(4, 8);
        spec.group([5], |group| group.paged(4, 16)).states(layers.iter().copied(), |states| {
            states.part([3, 5], DType::F32).part([7], DType::Bf16).slots(4).drafts(2)
        })
    };
    let spec = states(&[4, 1, 5]).build().unwrap();
    let layers: Vec<_> = spec.groups().iter().map(|group| group.layers().to_vec()).collect();
    assert_eq!(layers, [[0, 2, 3].map(LayerId).to_vec(), vec![LayerId(5)]]);
    assert_eq!((spec.locate(LayerId(4)), spec.locate_state(LayerId(4))), (None, Some((0, 1))));
    assert_eq!(spec.locate_state(LayerId(0)), None);
    assert_eq!(spec.locate(LayerId(5)), Some((GroupId(1), 0)));
    let [of] = spec.states() else { panic!("one group of states") };
    // 15 values in 64 bytes and 7 in 32, for 3 layers; 4 slots and one of zeros.
    assert_eq!((of.state_bytes(), spec.memory().bytes_states), (288, 5 * 288));
    assert_eq!(spec.sequences_that_fit(1), 2, "each needs its state and the next one");
    assert_eq!((spec.max_sequences(), spec.prefix_reuse()), (4, PrefixReuse::Off));

    // Blocks without bytes, in a cache without attention.
    let spec = CacheSpec::builder().layers(2).paged(16, 4);
    let spec = spec.states([0, 1], |states| states.part([8], DType::F16).slots(2)).build().unwrap();
    let [group] = spec.groups() else { panic!("one group") };
    assert_eq!((group.layers(), spec.memory().bytes_total), (&[][..], 0));
    assert_eq!((spec.memory().tokens, spec.memory().bytes_per_token), (64, 0));
}

#[test]
fn snapshots_keep_each_part_in_their_form() {
    let kept = |format: StateFormat| {
        let spec = builder().states([0], |states| {
            let states = states.part([3, 5], DType::F32).part([320], DType::F32);
            states.part([7], DType::Bf16).slots(4).snapshots(2, format)
        });
        let spec = spec.build().unwrap();
        let of = &spec.states()[0];
        // Slots are the same beside snapshots of any form: 15, 320 and 7 values.
        assert_eq!(of.parts().iter().map(StatePart::slot_bytes).sum::<u64>(), 64 + 1280 + 32);
        let parts = of.snapshots().unwrap().parts();
        parts.iter().map(|p| (p.format(), p.dtype(), p.slot_bytes(), p.row())).collect::<Vec<_>>()
    };
    let windows = (KvFormat::Bf16, DType::Bf16, 32, 7);
    let [f32, f16, q8_0] = [KvFormat::F32, KvFormat::F16, KvFormat::Q8_0];
    let same = [(f32, DType::F32, 64, 15), (f32, DType::F32, 1280, 320), windows];
    assert_eq!(kept(StateFormat::Same), same);
    let rounded = [(f16, DType::F16, 32, 15), (f16, DType::F16, 640, 320), windows];
    assert_eq!(kept(StateFormat::F16), rounded);
    // The largest part alone, in sixteen blocks of 34 bytes.
    let quantised = [rounded[0], (q8_0, DType::F32, 544, 320), windows];
    assert_eq!(kept(StateFormat::Int8), quantised);
}

#[test]
fn snapshots_in_int8_quantise_the_largest_parts() {
    let kept = |parts: &[(&[u32], DType)]| {
        let spec = builder().states([0], |states| {
            let add = |states: StatesBuilder, (shape, dtype): &(&[u32], DType)| {
                states.part(shape, *dtype)
            };
            parts.iter().fold(states, add).slots(4).snapshots(2, StateFormat::Int8)
        });
        let spec = spec.build().unwrap();
        let parts = spec.states()[0].snapshots().unwrap().parts();
        parts.iter().map(StatePart::format).collect::<Vec<_>>()
    };
    let [bf16, f16, q8_0] = [KvFormat::Bf16, KvFormat::F16, KvFormat::Q8_0];
    let (wide, f32) = (DType::Bf16, DType::F32);
    // A part alone is the largest, also if it is a window.
    assert_eq!(kept(&[(&[48, 2], f32)]), [q8_0]);
    // Linear attention, and Mamba 1 whose matrix has 16 values for 4 of the window.
    assert_eq!(kept(&[(&[80, 3], f32), (&[4, 8, 12], f32)]), [f16, q8_0]);
    assert_eq!(kept(&[(&[64, 4], f32), (&[64, 16], f32)]), [f16, q8_0]);
    // From three quarters on.
    assert_eq!(kept(&[(&[300], f32), (&[400], f32), (&[299], f32)]), [q8_0, q8_0, f16]);
    // A part in 16 bits stays as it is and does not count.
    assert_eq!(kept(&[(&[900], wide), (&[299], f32), (&[400], f32)]), [bf16, f16, q8_0]);
}

#[test]
fn rows_of_quantised_parts_are_whole_blocks_or_the_part() {
    use super::states::row_of;
    // The largest divisor up to 512 that is a multiple of 32, else all values.
    let cases = [
        (1, 1, 1),
        (31, 31, 31),
        (32, 32, 32),
        (100, 100, 100),
        (1009, 1, 1009),
        (1024, 512, 512),
        (32 * 37, 296, 32),
        (128 * 128 * 3, 512, 512),
        (96 * 11, 352, 352),
        (600, 300, 600),
    ];
    for (values, plain, blocks) in cases {
        let rows = [KvFormat::F16, KvFormat::Q8_0].map(|format| row_of(values, format));
        assert_eq!(rows, [plain, blocks], "{values} values");
    }
}

#[test]
fn impossible_states_are_refused() {
    type Set = fn(StatesBuilder) -> StatesBuilder;
    let build = |layers: &[u16], set: Set| {
        builder().states(layers.iter().copied(), set).build().unwrap_err()
    };
    let cases: [(Set, &str); 9] = [
        (|s| s.slots(4), "a part of a state is not set"),
        (|s| s.part([1], DType::F32), "slots of states is not set"),
        (|s| s.part([1], DType::F32).slots(0), "slots of states is 0, at least 1 is needed"),
        (|s| s.part([2, 0], DType::F32).slots(4), "values of a part of a state is 0"),
        (|s| s.part([], DType::F32).slots(4), "values of a part of a state is 0"),
        (|s| s.part([1, 1, 1, 1], DType::F32).slots(4), "axes of a part of a state is 4"),
        (|s| s.part([1 << 16, 1 << 16], DType::F32).slots(4), "values of a part of a state over"),
        (|s| s.part([1], DType::U32).slots(4), "a part of a state: is of u32, must be f32"),
        (|s| s.part([1], DType::F32).slots(3).drafts(2), "slots of states: one sequence needs 4"),
    ];
    for (set, words) in cases {
        let error = build(&[0], set).to_string();
        assert!(error.starts_with(words), "{error}, expected {words}");
    }
    let one: Set = |s| s.part([1], DType::F32).slots(4);
    assert_eq!(build(&[0, 0], one), SpecError::LayerStates { layer: LayerId(0) });
    assert_eq!(build(&[2], one), SpecError::LayerOutOfRange { layer: LayerId(2), num_layers: 2 });
    assert_eq!(build(&[], one), SpecError::Zero { field: "layers of states" });
    let twice = builder().states([0], one).states([0], one).build();
    assert_eq!(twice, Err(SpecError::LayerStates { layer: LayerId(0) }));
    let parts: Set = |s| (0..7).fold(s.slots(4), |s, _| s.part([1], DType::F32));
    let field = "parts of a state";
    assert_eq!(build(&[0], parts), SpecError::TooLarge { field, got: 7, max: 6 });
    let large: Set = |s| s.part([1 << 31], DType::F32).slots(u32::MAX - 1);
    assert!(matches!(build(&[0], large), SpecError::Overflow { .. } | SpecError::TooLarge { .. }));
    let lazy = CacheSpec::builder().layers_on_demand().kv_heads(1).head_dim(4).paged(4, 4);
    let refused = lazy.states([0], one).build().unwrap_err().to_string();
    assert_eq!(refused, "states: the number of layers must be fixed");
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
