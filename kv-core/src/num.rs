//! Number conversions that cannot lose value on the machines we support.

// Block numbers and token counts are `u32`; a host with a narrower address space cannot hold them.
const _: () = assert!(usize::BITS >= 32 && usize::BITS <= 64, "usize must be 32 or 64 bits wide");

/// Widens a count or an index to `usize`.
pub(crate) const fn to_usize(n: u32) -> usize {
    #[expect(clippy::as_conversions, reason = "widening, by the assertion above")]
    {
        n as usize
    }
}

/// Widens a length to `u64`.
pub(crate) const fn to_u64(n: usize) -> u64 {
    #[expect(clippy::as_conversions, reason = "widening, by the assertion above")]
    {
        n as u64
    }
}

/// Bytes that a list takes, room for more included.
pub(crate) fn list_bytes<T>(list: &Vec<T>) -> usize {
    list.capacity().saturating_mul(size_of::<T>())
}

/// Empties a list that every call fills anew. Memory of which the last call used little goes back:
/// one large call is not paid for ever after.
pub(crate) fn recycle<T>(list: &mut Vec<T>) {
    const KEPT_BYTES: usize = 64 << 10;
    let kept = KEPT_BYTES.checked_div(size_of::<T>()).unwrap_or(usize::MAX);
    let (len, capacity) = (list.len(), list.capacity());
    list.clear();
    if capacity > kept && len <= capacity / 4 {
        list.shrink_to(len.saturating_mul(2).max(kept));
    }
}

/// Narrows a length that an earlier check has bounded; saturates if that check is wrong.
pub(crate) fn to_u32(n: usize) -> u32 {
    debug_assert!(u32::try_from(n).is_ok(), "a length passed its check and does not fit u32");
    u32::try_from(n).unwrap_or(u32::MAX)
}
