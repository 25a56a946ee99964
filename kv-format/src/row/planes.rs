//! Packing of the codes of the Lloyd-Max formats: bit planes, which unpack by shifts and masks of
//! whole vectors.
//!
//! A group of `n <= 32` codes is a sequence of planes. A plane of `w` bits per code holds `p = 8 /
//! w` codes per byte in `m = ceil(n / p)` bytes: byte `i` has code `i + j * m` at bit `j * w`, for
//! `j` below `p`. So the low bits of all bytes are `m` neighbouring codes.
#![expect(
    clippy::inline_always,
    reason = "n is at most 32, and groups have the bytes that code_bytes says; inlined, so that \
              the lengths of whole groups are constants"
)]

/// Codes that are packed together.
pub(super) const GROUP: usize = 32;

/// Returns the bytes of a whole group of codes of `bits` bits.
pub(super) const fn group_bytes(bits: u32) -> usize {
    match bits {
        3 => 12,
        4 => 16,
        _ => 24,
    }
}

/// Packs a group of codes of `BITS` (3, 4 or 6) bits into zeroed bytes.
#[inline(always)]
pub(super) fn pack<const BITS: u32>(codes: &[u8], bytes: &mut [u8]) {
    match BITS {
        3 => {
            let (magnitudes, signs) = bytes.split_at_mut(codes.len().div_ceil(4));
            pack_plane::<2>(codes, 0, magnitudes);
            pack_plane::<1>(codes, 2, signs);
        }
        4 => pack_plane::<4>(codes, 0, bytes),
        _ => {
            let (low, high) = bytes.split_at_mut(codes.len().div_ceil(2));
            pack_plane::<4>(codes, 0, low);
            pack_plane::<2>(codes, 4, high);
        }
    }
}

/// Unpacks a group of codes of `BITS` (3, 4 or 6) bits into zeroed bytes.
#[inline(always)]
pub(super) fn unpack<const BITS: u32>(bytes: &[u8], codes: &mut [u8]) {
    match BITS {
        3 => {
            let (magnitudes, signs) = bytes.split_at(codes.len().div_ceil(4));
            unpack_plane::<2>(magnitudes, codes, 0);
            unpack_plane::<1>(signs, codes, 2);
        }
        4 => unpack_plane::<4>(bytes, codes, 0),
        _ => {
            let (low, high) = bytes.split_at(codes.len().div_ceil(2));
            unpack_plane::<4>(low, codes, 0);
            unpack_plane::<2>(high, codes, 4);
        }
    }
}

/// Packs `W` bits of every code, from bit `from` on.
#[inline(always)]
fn pack_plane<const W: usize>(codes: &[u8], from: u32, bytes: &mut [u8]) {
    let mask = (1_u8 << W) - 1;
    let m = codes.len().div_ceil(8 / W);
    for j in 0..8 / W {
        let codes = codes.get(j * m..).unwrap_or_default();
        for (byte, code) in bytes[..m].iter_mut().zip(codes) {
            *byte |= (code >> from & mask) << (j * W);
        }
    }
}

#[inline(always)]
fn unpack_plane<const W: usize>(bytes: &[u8], codes: &mut [u8], to: u32) {
    let mask = (1_u8 << W) - 1;
    let m = codes.len().div_ceil(8 / W);
    for j in 0..8 / W {
        let codes = codes.get_mut(j * m..).unwrap_or_default();
        for (code, byte) in codes.iter_mut().zip(&bytes[..m]) {
            *code |= (byte >> (j * W) & mask) << to;
        }
    }
}
