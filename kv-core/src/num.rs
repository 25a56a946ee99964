//! Conversions of numbers, and memory of lists.
pub use kv_format::num::*;

/// Returns the bytes of a list, unused capacity included.
pub(crate) fn list_bytes<T>(list: &Vec<T>) -> usize {
    list.capacity() * size_of::<T>()
}

/// Empties a list that every call fills again. Frees memory of which the last call used little, so
/// that one large call does not keep it for ever.
pub(crate) fn recycle<T>(list: &mut Vec<T>) {
    const KEPT_BYTES: usize = 64 << 10;
    // Items without bytes: all.
    let kept = KEPT_BYTES.checked_div(size_of::<T>()).unwrap_or(usize::MAX);
    let (len, capacity) = (list.len(), list.capacity());
    list.clear();
    if capacity > kept && len <= capacity / 4 {
        list.shrink_to((len * 2).max(kept));
    }
}
