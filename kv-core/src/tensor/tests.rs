//! Accepted views, and the error for each kind of wrong one.
use super::*;
use crate::error::PlanError;
use crate::geometry::Axes;

type View<'a> = TensorView<'a, ()>;
type ViewMut<'a> = TensorViewMut<'a, ()>;

/// Two entries with at most 3 and together 4 tokens, 2 heads of 4 values.
fn need(axes: Axes) -> TokenRequirement {
    TokenRequirement {
        tensor: "k",
        axes,
        batch: 2,
        tokens_max: 3,
        tokens_total: 4,
        heads: Some(2),
        dim: 4,
    }
}

fn refusal(view: View<'_>, axes: Axes) -> String {
    TokenTensor::check(view, &need(axes)).unwrap_err().to_string()
}

#[test]
fn rows_of_the_three_formats() {
    let values = [0.0_f32; 64];
    let check = |dims: &[u32], axes| {
        *TokenTensor::check(View::host(&values, dims), &need(axes)).unwrap().rows()
    };
    let thd = check(&[5, 2, 4], Axes::Thd);
    assert_eq!(thd.offset(1, 3, 1), 4 * 8);
    let bshd = check(&[2, 4, 2, 4], Axes::Bshd);
    assert_eq!((bshd.batch(), bshd.tokens()), (2, 4));
    assert_eq!(bshd.offset(1, 99, 3), (4 + 3) * 8);
    let sbhd = check(&[4, 2, 2, 4], Axes::Sbhd);
    assert_eq!((sbhd.batch(), sbhd.tokens()), (2, 4));
    assert_eq!(sbhd.offset(1, 99, 3), (3 * 2 + 1) * 8);
}

#[test]
fn outer_strides_are_free() {
    let values = [0.0_f32; 70];
    let view = || View::host(&values, &[2, 3, 2, 4]);
    let padded = view().with_outer_strides([30, 10]);
    let rows = *TokenTensor::check(padded, &need(Axes::Bshd)).unwrap().rows();
    assert_eq!(rows.offset(1, 0, 2), 50);
    let short = view().with_outer_strides([60, 10]);
    assert_eq!(refusal(short, Axes::Bshd), "k needs 352 bytes, got 280");
    let absurd = view().with_outer_strides([u64::MAX, 10]);
    assert!(refusal(absurd, Axes::Bshd).starts_with("k needs 18446744073709551615 bytes"));
    // An input may repeat a row, an output may not.
    let broadcast = view().with_outer_strides([0, 0]);
    assert!(TokenTensor::check(broadcast, &need(Axes::Bshd)).is_ok());
    let mut out = [0.0_f32; 70];
    for strides in [[0, 8], [8, 8], [23, 8], [24, 7], [8, 15]] {
        let out = ViewMut::host(&mut out, &[2, 3, 2, 4]).with_outer_strides(strides);
        let refused = TokenTensorMut::check(out, &need(Axes::Bshd)).unwrap_err();
        assert!(matches!(refused, PlanError::Overlap { .. }), "{strides:?}: {refused}");
    }
    // Without entries there are no rows, and the dense strides are 0.
    let nothing = TokenRequirement { batch: 0, tokens_total: 0, ..need(Axes::Sbhd) };
    let empty = ViewMut::host(&mut out, &[3, 0, 2, 4]);
    assert!(TokenTensorMut::check(empty, &nothing).is_ok());
    for strides in [[24, 8], [8, 16], [30, 10]] {
        let out = ViewMut::host(&mut out, &[2, 3, 2, 4]).with_outer_strides(strides);
        assert!(TokenTensorMut::check(out, &need(Axes::Bshd)).is_ok(), "{strides:?}");
    }
}

#[test]
fn wrong_shapes_are_named() {
    let values = [0.0_f32; 256];
    for (dims, axes, text) in [
        (
            &[3, 2, 4][..],
            Axes::Thd,
            "k has shape [3, 2, 4], expected [t at least, h, d] = [4, 2, 4]",
        ),
        (&[4, 1, 4], Axes::Thd, "k has shape [4, 1, 4], expected [t at least, h, d] = [4, 2, 4]"),
        (&[4, 2, 3], Axes::Thd, "k has shape [4, 2, 3], expected [t at least, h, d] = [4, 2, 4]"),
        (
            &[2, 3, 2, 4],
            Axes::Thd,
            "k has shape [2, 3, 2, 4], expected [t at least, h, d] = [4, 2, 4]",
        ),
        (
            &[3, 2, 2, 4],
            Axes::Bshd,
            "k has shape [3, 2, 2, 4], expected [b at least, s at least, h, d] = [2, 3, 2, 4]",
        ),
        (
            &[2, 3, 2, 4],
            Axes::Sbhd,
            "k has shape [2, 3, 2, 4], expected [s at least, b at least, h, d] = [3, 2, 2, 4]",
        ),
        (
            &[1, 2, 3, 2, 4],
            Axes::Bshd,
            "k has shape [1, 2, 3, 2] and 1 more axis, expected [b at least, s at least, h, d] = \
             [2, 3, 2, 4]",
        ),
        (
            &[2, 3, 2, 4, 1],
            Axes::Bshd,
            "k has shape [2, 3, 2, 4] and 1 more axis, expected [b at least, s at least, h, d] = \
             [2, 3, 2, 4]",
        ),
        (&[], Axes::Thd, "k has shape [], expected [t at least, h, d] = [4, 2, 4]"),
    ] {
        assert_eq!(refusal(View::host(&values, dims), axes), text);
    }
}

#[test]
fn wrong_types_bytes_and_alignments_are_named() {
    let integers = [0_u32; 64];
    let text = "k is u32, expected f32, f16 or bf16";
    assert_eq!(refusal(View::host(&integers, &[4, 2, 4]), Axes::Thd), text);
    let short = [0.0_f32; 31];
    let text = "k needs 128 bytes, got 124";
    assert_eq!(refusal(View::host(&short, &[4, 2, 4]), Axes::Thd), text);
    let values = [0.0_f32; 64];
    let bytes: &[u8] = bytemuck::cast_slice(&values);
    let odd = View::host_bytes(DType::F32, &bytes[2..], &[4, 2, 4]);
    let text = "k starts at an address or offset that is not a multiple of 4 bytes";
    assert_eq!(refusal(odd, Axes::Thd), text);
    let device = View::device(DType::F16, &(), 3, &[4, 2, 4]);
    let text = "k starts at an address or offset that is not a multiple of 2 bytes";
    assert_eq!(refusal(device, Axes::Thd), text);
}
