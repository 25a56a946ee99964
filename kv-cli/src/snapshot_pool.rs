//! The size of a pool of snapshots, as `kv plan` and `kv replay` are given it.
use std::fmt;
use std::str::FromStr;

/// The size of a pool of snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SnapshotPool {
    /// Per cent of the memory, at most 100.
    Percent(u32),
    Count(u32),
}

impl SnapshotPool {
    /// The share that is kept for snapshots unless given.
    pub(crate) const DEFAULT: Self = Self::Percent(15);
}

/// A text that is no size of a pool of snapshots.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected a share from 0% to 100%, or a number of snapshots")]
pub(crate) struct NoSnapshotPool;

impl FromStr for SnapshotPool {
    type Err = NoSnapshotPool;

    fn from_str(text: &str) -> Result<Self, NoSnapshotPool> {
        let number = |text: &str| text.parse::<u32>().map_err(|_| NoSnapshotPool);
        match text.strip_suffix('%') {
            Some(share) => match number(share)? {
                share @ 0..=100 => Ok(Self::Percent(share)),
                _ => Err(NoSnapshotPool),
            },
            None => number(text).map(Self::Count),
        }
    }
}

impl fmt::Display for SnapshotPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(share) => write!(f, "{share}%"),
            Self::Count(count) => write!(f, "{count}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_a_share_or_a_number() {
        assert_eq!("15%".parse(), Ok(SnapshotPool::Percent(15)));
        assert_eq!("2000".parse(), Ok(SnapshotPool::Count(2000)));
        for text in ["0%", "100%", "0", "4294967295"] {
            let pool = text.parse::<SnapshotPool>().expect(text);
            assert_eq!(pool.to_string(), text);
        }
        for text in ["101%", "-1%", "%", "", "1.5", "4294967296", "ten"] {
            assert_eq!(text.parse::<SnapshotPool>(), Err(NoSnapshotPool), "{text}");
        }
    }
}
