//! Calls that prefill supports, and launch sizes.
use crate::params::FORMATS;
use kv_core::error::DeviceErrorKind;

use super::*;
use crate::decode::Kind;

const FORMAT_F32: u32 = KvFormat::F32.kernel_code();
const L6: u32 = KvFormat::L6(ScaleGroup::Row).kernel_code();
const L4: u32 = KvFormat::L4(ScaleGroup::Row).kernel_code();
const INT8: u32 = KvFormat::Int8(Scaling::Row).kernel_code();
/// One-byte codes with a scale per tensor.
const GIVEN: u32 = KvFormat::Fp8E4m3(Scaling::Tensor).kernel_code();
const ROOM: u32 = 99 << 10;

fn params(dtype: u32, formats: [u32; 2], dim: u32) -> AttendParams {
    let tensor = Tensor { data: 4096, dtype, dim, token_stride: 2048, ..Tensor::default() };
    let [k_plane, v_plane] = formats.map(|format| Plane {
        base: 4096,
        block_bytes: 4096,
        token_stride: 512,
        head_stride: 512,
        head_dim: dim,
        format,
        ..Plane::default()
    });
    AttendParams { q: tensor, out: tensor, k_plane, v_plane, scale: 0.1, ..AttendParams::default() }
}

fn kernel(params: &AttendParams) -> Option<&'static str> {
    Prefill::of(params, ROOM).ok().map(|prefill| prefill.kernel)
}

/// A change that breaks a rule.
type Change = fn(&mut AttendParams);

fn with(params: &AttendParams, change: Change) -> AttendParams {
    let mut params = *params;
    change(&mut params);
    params
}

/// Every rule, broken alone: what it leaves to the next kernel, and the last to the general one.
#[test]
fn each_rule_refuses() {
    let plain = params(F16, [F16; 2], 128);
    let coded = params(F16, [INT8; 2], 128);
    let copied = |params: &AttendParams| Prefill::copied(params, ROOM).map(|it| it.kernel);
    let staged = |params: &AttendParams| Prefill::staged(params, ROOM).map(|it| it.kernel);
    let decoded = |params: &AttendParams| Prefill::decoded(params, ROOM).map(|it| it.kernel);
    assert_eq!(copied(&plain), Ok("prefill_f16_128"));
    assert_eq!(staged(&coded), Ok("prefill_rows_128"));
    assert_eq!(decoded(&coded), Ok("prefill_coded_128"));
    // Rules of all kernels.
    let common: [(Change, Refusal); 5] = [
        (|it| it.q.dtype = 0, LONG_QUERIES),
        (|it| it.v_plane.head_dim = 64, UNLIKE_DIMS),
        (|it| it.q.data += 2, UNALIGNED_TENSORS),
        (|it| it.out.token_stride += 8, UNALIGNED_TENSORS),
        (|it| (it.k_plane.head_dim, it.v_plane.head_dim) = (72, 72), NO_DIM),
    ];
    for (change, why) in common {
        assert_eq!(copied(&with(&plain, change)), Err(why));
        assert_eq!(staged(&with(&coded, change)), Err(why));
        assert_eq!(decoded(&with(&coded, change)), Err(why));
    }
    let of_copied: [(Change, Refusal); 7] = [
        (|it| it.k_plane.format = INT8, OTHER_TYPE),
        (|it| it.v_plane.format = BF16, OTHER_TYPE),
        (|it| it.v_plane.token_stride += 2, NOT_COPIED),
        (|it| it.k_plane.transforms = 1, NOT_COPIED),
        (|it| it.k_plane.block_means = 1, NOT_COPIED),
        (|it| it.v_plane.full_precision_prefix = 4, NOT_COPIED),
        (|it| it.v_plane.has_tail = 1, NOT_COPIED),
    ];
    for (change, why) in of_copied {
        assert_eq!(copied(&with(&plain, change)), Err(why));
    }
    let of_decoded: [(Change, Refusal); 5] = [
        (|it| it.k_plane.format = FORMAT_F32, NO_FORMAT),
        (|it| it.v_plane.format = BF16, NO_FORMAT),
        (|it| it.k_plane.block_means = 1, BLOCK_MEANS),
        (|it| (it.lse.data, it.k_plane.format) = (4096, L6), ROUNDED),
        (|it| (it.lse.data, it.k_plane.transforms) = (4096, 1), ROUNDED),
    ];
    for (change, why) in of_decoded {
        assert_eq!(decoded(&with(&coded, change)), Err(why));
    }
    let small = 48 << 10;
    assert_eq!(Prefill::copied(&plain, small), Err(NO_ROOM));
    assert_eq!(Prefill::decoded(&coded, small - (16 << 10)), Err(NO_ROOM));
}

/// The rules of [`Prefill::staged`] besides those of all kernels.
#[test]
fn each_rule_of_staged_kernels_refuses() {
    let coded = params(F16, [INT8; 2], 128);
    let staged = |params: &AttendParams| Prefill::staged(params, ROOM).map(|it| it.kernel);
    let of_staged: [(Change, Refusal); 17] = [
        (|it| (it.k_plane.head_dim, it.v_plane.head_dim) = (256, 256), NO_STAGED_DIM),
        (|it| it.k_plane.format = L6, OTHER_FORMAT),
        (|it| it.k_plane.format = F16, OTHER_FORMAT),
        (|it| it.v_plane.format = GIVEN, UNLIKE_FORMATS),
        (|it| it.k_plane.block_means = 1, BLOCK_MEANS),
        (|it| it.k_plane.full_precision_prefix = 4, NOT_STAGED),
        (|it| it.v_plane.has_tail = 1, NOT_STAGED),
        (|it| it.k_plane.base += 8, NOT_STAGED),
        (|it| it.v_plane.block_bytes += 2, NOT_STAGED),
        (|it| it.v_plane.token_stride += 1, NOT_STAGED),
        (|it| it.soft_cap = 30.0, NO_EXPONENTS),
        (|it| it.scale = 0.0, NO_EXPONENTS),
        (|it| it.scale = -0.1, NO_EXPONENTS),
        (|it| it.scale = f32::NAN, NO_EXPONENTS),
        (|it| (it.lse.data, it.k_plane.transforms) = (4096, 1), ROUNDED),
        (|it| (it.lse.data, it.k_plane.format, it.v_plane.format) = (4096, L4, L4), ROUNDED),
        (
            |it| {
                (it.k_plane.format, it.v_plane.format) = (GIVEN, GIVEN);
                it.k_plane.head_stride += 2;
            },
            NOT_STAGED,
        ),
    ];
    for (change, why) in of_staged {
        assert_eq!(staged(&with(&coded, change)), Err(why));
    }
    assert_eq!(Prefill::staged(&coded, 48 << 10), Err(NO_ROOM));
}

#[test]
fn aligned_rows_of_the_queries_type_are_copied() {
    let params = params(F16, [F16; 2], 128);
    assert_eq!(kernel(&params), Some("prefill_f16_128"));
    let mut unaligned = params;
    unaligned.v_plane.token_stride += 2;
    assert_eq!(kernel(&unaligned), Some("prefill_coded_128"));
    let mut transformed = params;
    transformed.k_plane.transforms = 1;
    assert_eq!(kernel(&transformed), Some("prefill_coded_128"));
    let mut unaligned = params;
    unaligned.q.data += 2;
    assert_eq!(kernel(&unaligned), None);
}

#[test]
fn more_rows_than_kernels_can_count_are_refused() {
    for (total_q, group) in [(0, 8), (1 << 28, 8), (ROWS_MAX, 1), (1, ROWS_MAX)] {
        assert!(require_rows(total_q, group).is_ok(), "{total_q} x {group}");
    }
    for (total_q, group) in [(ROWS_MAX + 1, 1), (1 << 29, 8), (1 << 31, 2), (u32::MAX, u32::MAX)] {
        let refused = require_rows(total_q, group).unwrap_err();
        assert_eq!(refused.kind(), DeviceErrorKind::Unsupported, "{refused}");
    }
}

#[test]
fn codes_of_every_format_are_staged_or_decoded() {
    let quantised = FORMATS.iter().filter(|format| format.is_quantised());
    let numbers: Vec<_> = quantised.map(|format| format.kernel_code()).collect();
    for dim in PREFILL_DIMS {
        for k in numbers.iter().copied() {
            for v in numbers.iter().copied() {
                let of_k = |family: &&Staged| family.formats.iter().any(|it| it.kernel_code() == k);
                let family = STAGED.iter().find(of_k).filter(|_| k == v);
                let index = STAGED_DIMS.iter().position(|known| *known == dim);
                let staged = family.zip(index).map(|(family, index)| family.names[index]);
                let coded = format!("prefill_coded_{dim}");
                let name = |dtype| kernel(&params(dtype, [k, v], dim));
                assert_eq!(name(F16), Some(staged.unwrap_or(&coded)));
                assert_eq!(name(BF16), Some(staged.unwrap_or(&coded)));
                assert_eq!(name(FORMAT_F32), None);
            }
        }
    }
}

#[test]
fn kernels_of_codes_are_for_their_formats() {
    for (format, family) in [
        ("fp8-e4m3", Some("codes")),
        ("fp8-e5m2-head", Some("codes")),
        ("int8-head", Some("codes")),
        ("fp8-e4m3-row", Some("rows")),
        ("fp8-e5m2-row", Some("rows")),
        ("int8", Some("rows")),
        ("l4", Some("l4")),
        ("l4-g32", None),
        ("q8_0", None),
    ] {
        let code = format.parse::<KvFormat>().unwrap().kernel_code();
        for dim in STAGED_DIMS {
            let expected = family.map(|family| format!("prefill_{family}_{dim}"));
            let staged = Prefill::staged(&params(BF16, [code; 2], dim), ROOM);
            assert_eq!(staged.ok().map(|it| it.kernel), expected.as_deref(), "{format}");
        }
    }
}

#[test]
fn rows_with_scales_are_staged_from_any_even_address() {
    for format in ["int8", "fp8-e4m3-row", "l4"] {
        let code = format.parse::<KvFormat>().unwrap().kernel_code();
        let mut params = params(BF16, [code; 2], 64);
        (params.k_plane.token_stride, params.v_plane.head_stride) = (130, 66);
        (params.k_plane.transforms, params.v_plane.transforms) = (1, 1);
        assert!(Prefill::staged(&params, ROOM).is_ok(), "{format}");
    }
}

#[test]
fn other_unquantised_rows_are_decoded_if_they_fit() {
    let code = BF16 + 1;
    assert_eq!(kernel(&params(BF16, [BF16, BF16], 64)), Some("prefill_bf16_64"));
    assert_eq!(kernel(&params(BF16, [F16, code], 64)), Some("prefill_coded_64"));
    assert_eq!(kernel(&params(F16, [code, F16], 64)), Some("prefill_coded_64"));
    assert_eq!(kernel(&params(F16, [code, BF16], 64)), None);
    assert_eq!(kernel(&params(BF16, [FORMAT_F32, code], 64)), None);
}

#[test]
fn a_log_sum_exp_needs_exact_scores() {
    for (format, is_exact) in [
        ("f16", true),
        ("fp8-e4m3", true),
        ("int8-head", true),
        ("l6", false),
        ("l6-g32", false),
        ("l3-g32", false),
        ("q8_0", false),
        ("q4_0", false),
        ("nvfp4", true),
    ] {
        let code = format.parse::<KvFormat>().unwrap().kernel_code();
        let mut params = params(BF16, [code, L6], 64);
        params.lse = Tensor { data: 4096, ..Tensor::default() };
        assert_eq!(kernel(&params).is_some(), is_exact, "{format}");
        params.k_plane.transforms = 1;
        assert_eq!(kernel(&params), None, "{format}");
    }
}

#[test]
fn unsupported_calls_are_left_to_the_general_kernel() {
    let code = [BF16 + 1; 2];
    assert_eq!(kernel(&params(BF16, code, 72)), None);
    let mut uneven = params(BF16, code, 64);
    uneven.v_plane.head_dim = 80;
    assert_eq!(kernel(&uneven), None);
    let mut means = params(BF16, code, 64);
    means.k_plane.block_means = 1;
    assert_eq!(kernel(&means), None);
    let mut tail = params(BF16, code, 64);
    (tail.k_plane.full_precision_prefix, tail.k_plane.has_tail) = (4, 1);
    assert_eq!(kernel(&tail), Some("prefill_coded_64"));
    let little = Prefill::of(&params(BF16, code, 256), 48 << 10);
    assert_eq!(little, Err(NO_ROOM));
}

#[test]
fn shared_memory_is_as_the_sources_document() {
    // By hand: 2 * 128 * (128 + 4 * 64) + 64 * 32 + 32, 2 * 256 * (64 + 4 * 32) + 32 * 32 + 32,
    // 2 * 256 * (64 + 2 * 32) + 32 * 64 + 800,
    // 2 * 128 * (128 + 4 * 32) + 2 * 32 * 144 + 56 * 32 + 8 * 128 + 32, and with 80 for 144.
    let bytes = |params| Prefill::of(&params, ROOM).map(|prefill| prefill.shared_bytes);
    assert_eq!(bytes(params(F16, [F16; 2], 128)), Ok(100_384));
    assert_eq!(bytes(params(F16, [F16; 2], 256)), Ok(99_360));
    assert_eq!(bytes(params(F16, [BF16 + 1; 2], 256)), Ok(68_384));
    assert_eq!(bytes(params(F16, [GIVEN; 2], 128)), Ok(77_600));
    assert_eq!(bytes(params(F16, [L4; 2], 128)), Ok(73_504));
    // Two thread blocks share the 228 KB of a multiprocessor of Hopper, of which the system takes
    // 1 KB for each.
    for dim in STAGED_DIMS {
        assert!(bytes(params(F16, [GIVEN; 2], dim)).unwrap() <= 113 << 10, "{dim}");
    }
}

#[test]
fn tiles_are_as_large_as_registers_and_shared_memory_allow() {
    let code = BF16 + 1;
    for (dim, copied, decoded) in [
        (64, [128, 64, 2], [64, 64, 1]),
        (80, [128, 64, 2], [64, 64, 1]),
        (96, [128, 64, 2], [64, 64, 1]),
        (128, [128, 64, 2], [64, 64, 1]),
        (192, [64, 32, 2], [64, 32, 1]),
        (256, [64, 32, 2], [64, 32, 1]),
    ] {
        for (is_copied, expected) in [(true, copied), (false, decoded)] {
            let Tiles { rows, tokens, buffers } = Tiles::of(dim, is_copied);
            assert_eq!([rows, tokens, buffers], expected, "{dim}");
        }
        // The cards with the least shared memory, `sm_86` and `sm_89`, have this much per thread
        // block.
        for format in [F16, code] {
            let params = params(F16, [format; 2], dim);
            assert!(Prefill::of(&params, 101_376).is_ok(), "{dim}");
        }
    }
}

#[test]
fn a_grid_has_a_block_for_every_tile_of_rows_and_split() {
    let mut extent = Extent { total_q: 100, sequences: 3, kv_len_max: 512, ..Extent::default() };
    let grid = |extent: &Extent, format, dim| {
        let params = params(F16, [format; 2], dim);
        let selected = Prefill::of(&params, ROOM).unwrap();
        let work = Work {
            kind: Kind::Prefill { rows: selected.rows },
            slots: 8,
            kv_heads: 2,
            group: 4,
            full: false,
            window_left: u32::MAX,
            sink_tokens: 0,
            invariant: false,
            q_len_max: 8,
        };
        prefill(selected, &work, extent).grid
    };
    assert_eq!(grid(&extent, F16, 128), [6, 2, 1]);
    assert_eq!(grid(&extent, F16, 256), [9, 2, 1]);
    assert_eq!(grid(&extent, GIVEN, 128), [6, 2, 1]);
    assert_eq!(grid(&extent, L6, 128), [9, 2, 1]);
    // Two partial results for each slot, from a context on that may be split.
    extent.kv_len_max += 1;
    assert_eq!(grid(&extent, F16, 128), [6 + 8, 2, 1]);
}

#[test]
fn the_largest_head_dim_fits_and_the_next_does_not() {
    let extent = Extent::default();
    for (max, dim) in [(101_376, 1728), (232_448, 5824)] {
        assert_eq!(head_dim_max(max), dim);
        let bytes = |dim| rows(&params(F16, [F16; 2], dim), &extent, 1).shared_bytes;
        assert!(bytes(dim) <= max && bytes(dim + 1) > max, "{dim}");
    }
    assert_eq!(head_dim_max(1024), 0);
}
