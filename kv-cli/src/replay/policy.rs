//! The policies that can be replayed, by name.
use std::fmt;
use std::str::FromStr;

use kv::error::UnknownName;
use kv::eviction::Eviction;

/// A value of `--policy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Policy {
    /// A policy of caches.
    Real(Eviction),
    /// No evictions: the upper limit of reuse.
    Infinite,
    /// The upper limit for a capacity.
    Min,
}

/// One measurement: a policy, and its capacity if it has one.
pub(super) type Case = (Policy, Option<u32>);

impl Policy {
    /// The default policies.
    pub(super) const DEFAULT: [Self; 4] =
        [Self::Real(Eviction::Lru), Self::Real(Eviction::ReuseRate), Self::Infinite, Self::Min];

    /// The default policies of caches with states, for which no optimum is known.
    pub(super) const OF_STATES: [Self; 3] =
        [Self::Real(Eviction::Lru), Self::Real(Eviction::ReuseRate), Self::Infinite];

    /// Returns the policy of the cache. Without a limit there are no evictions, so any will do;
    /// [`Min`](super::min::Min) replaces it.
    pub(super) fn eviction(self) -> Eviction {
        match self {
            Self::Real(eviction) => eviction,
            Self::Infinite | Self::Min => Eviction::Lru,
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Real(eviction) => write!(f, "{eviction}"),
            Self::Infinite => f.write_str("infinite"),
            Self::Min => f.write_str("min"),
        }
    }
}

impl FromStr for Policy {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let real = Eviction::ALL.into_iter().map(Self::Real);
        let found =
            real.chain([Self::Infinite, Self::Min]).find(|policy| policy.to_string() == name);
        let names = "lru, lfu, priority, reuse-rate, infinite, min";
        found.ok_or_else(|| UnknownName::new("policy", name, names))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_has_a_name_in_the_error() {
        let error = "fifo".parse::<Policy>().expect_err("no policy").to_string();
        let (_, names) = error.split_once("expected one of ").expect("names");
        for name in names.split(", ") {
            assert_eq!(name.parse::<Policy>().expect(name).to_string(), name);
        }
        let all = Eviction::ALL.map(Policy::Real);
        for policy in all.into_iter().chain(Policy::DEFAULT) {
            assert!(names.split(", ").any(|name| name == policy.to_string()), "{policy}");
        }
    }
}
