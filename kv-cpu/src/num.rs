//! Widening conversions that cannot lose value on the machines we support.

// Token counts and offsets are `u32` and `u64`; memory of a narrower host cannot hold them.
const _: () = assert!(usize::BITS >= 32 && usize::BITS <= 64, "usize must be 32 or 64 bits wide");

/// Widens a count or an index.
pub(crate) const fn to_usize(n: u32) -> usize {
    #[expect(clippy::as_conversions, reason = "widening, by the assertion above")]
    {
        n as usize
    }
}

/// Widens a length.
pub(crate) const fn to_u64(n: usize) -> u64 {
    #[expect(clippy::as_conversions, reason = "widening, by the assertion above")]
    {
        n as u64
    }
}

/// Narrows a count of rows or heads, which began as one of 32 bits.
pub(crate) fn to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Narrows a byte offset that an earlier check holds below the length of a buffer.
pub(crate) fn offset(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
