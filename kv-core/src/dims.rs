//! Extents of a tensor's axes, for views and for the errors about them.
use std::fmt;

/// Extents of up to four axes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Dims {
    rank: u8,
    extents: [u32; 4],
}

impl Dims {
    /// Stores up to four extents; for more it stores an impossible rank, which is refused later.
    pub fn new(extents: &[u32]) -> Self {
        let mut dims =
            Self { rank: u8::try_from(extents.len()).unwrap_or(u8::MAX), extents: [0; 4] };
        for (to, from) in dims.extents.iter_mut().zip(extents) {
            *to = *from;
        }
        dims
    }

    /// Returns these axes and an innermost one of 1; the same axes where that would be a fifth.
    pub(crate) fn with_unit(self) -> Self {
        let mut dims = self;
        if let Some(last) = dims.extents.get_mut(usize::from(self.rank)) {
            *last = 1;
            dims.rank = self.rank + 1;
        }
        dims
    }

    /// Returns the extents, outermost first; `None` for more axes than four, of which the first
    /// four may look like a tensor that fits.
    pub(crate) fn exact(&self) -> Option<&[u32]> {
        self.extents.get(..usize::from(self.rank))
    }

    /// Returns the extents, outermost first; the first four of more.
    pub fn as_slice(&self) -> &[u32] {
        self.exact().unwrap_or(&self.extents)
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()?;
        match self.rank.saturating_sub(4) {
            0 => Ok(()),
            1 => f.write_str(" and 1 more axis"),
            more => write!(f, " and {more} more axes"),
        }
    }
}
