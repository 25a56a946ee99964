//! Loops over pieces that take more than the vectors: BF16, VBMI and VNNI.
use std::sync::LazyLock;

use super::bf16::Bf16;
use super::vbmi::Vbmi;
use super::vnni::Vnni;
use super::{Avx512, PIECES};
use crate::encoding::Encoding;
use crate::kernel::piece::{self, Bytes, Coded, Fp8, Loops, Meeting, Paired, Piece, Plain, Words};
use crate::kernel::stored::{E4m3, E5m2};

/// The loops of this CPU, which has the vectors.
pub(in super::super) static LOOPS: LazyLock<Loops> = LazyLock::new(|| {
    let (has_bf16, has_vbmi) =
        (is_x86_feature_detected!("avx512bf16"), is_x86_feature_detected!("avx512vbmi"));
    let mut loops = PIECES.clone();
    if has_bf16 {
        loops.set_weigh_words(Encoding::Bf16Pairs, Words::Bf16, weigh_bf16);
    }
    if has_vbmi {
        loops.set(Encoding::E4m3, weigh_codes::<E4m3>, sum_codes::<E4m3>);
        loops.set(Encoding::E5m2, weigh_codes::<E5m2>, sum_codes::<E5m2>);
    }
    if has_bf16 && has_vbmi {
        loops.set_weigh_words(Encoding::E4m3, Words::Bf16, weigh_codes_bf16::<E4m3>);
        loops.set_weigh_words(Encoding::E5m2, Words::Bf16, weigh_codes_bf16::<E5m2>);
    }
    if is_x86_feature_detected!("avx512vnni") {
        loops.set_weigh_words(Encoding::Int8, Words::Fixed, weigh_bytes);
    }
    loops
});

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn weigh_bf16(args: &mut Meeting<'_>, piece: &Piece) {
    let bf16 = Bf16(Avx512::witness());
    // SAFETY: the condition is passed on.
    unsafe { piece::weigh_words(Paired(bf16, Plain(bf16.0)), args, piece) };
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
unsafe fn weigh_codes<E: Fp8>(args: &mut Meeting<'_>, piece: &Piece) {
    // SAFETY: the condition is passed on.
    unsafe { piece::weigh(Coded::<_, E>::new(Vbmi(Avx512::witness())), args, piece) };
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
unsafe fn sum_codes<E: Fp8>(args: &mut Meeting<'_>, piece: &Piece) {
    // SAFETY: the condition is passed on.
    unsafe { piece::sum(Coded::<_, E>::new(Vbmi(Avx512::witness())), args, piece) };
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")]
unsafe fn weigh_codes_bf16<E: Fp8>(args: &mut Meeting<'_>, piece: &Piece) {
    let (bf16, codes) = (Bf16(Avx512::witness()), Coded::<_, E>::new(Vbmi(Avx512::witness())));
    // SAFETY: the condition is passed on.
    unsafe { piece::weigh_words(Paired(bf16, codes), args, piece) };
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn weigh_bytes(args: &mut Meeting<'_>, piece: &Piece) {
    // SAFETY: the condition is passed on.
    unsafe { piece::weigh_words(Bytes(Vnni(Avx512::witness())), args, piece) };
}
