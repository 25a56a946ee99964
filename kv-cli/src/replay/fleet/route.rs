//! Routes: how a router chooses the instance of a request.
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use kv::error::UnknownName;

use super::events::Event;
use super::index::{Found, Index};
use super::workload::Block;
use crate::mix::mix;
use crate::num::{to_u32, to_u64, to_usize};

/// A value of `--route`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// The instances in turn.
    RoundRobin,
    /// The instance with the least work queued.
    Least,
    /// Consistent hashing of the second block of a prompt, or of its only one: the first is that of
    /// a system prompt that all have in common.
    Hash,
    /// The instance with the fewest tokens to compute and waiting, by what its events have told
    /// about its blocks. Of equal ones, that with the least work queued.
    Kv,
}

impl Route {
    /// Every route, in the order of reports.
    pub(crate) const ALL: [Self; 4] = [Self::RoundRobin, Self::Least, Self::Hash, Self::Kv];

    /// Returns whether the router reads the events of the instances.
    pub(super) fn reads_events(self) -> bool {
        self == Self::Kv
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RoundRobin => "round-robin",
            Self::Least => "least",
            Self::Hash => "hash",
            Self::Kv => "kv",
        })
    }
}

impl FromStr for Route {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let found = Self::ALL.into_iter().find(|route| route.to_string() == name);
        found.ok_or_else(|| UnknownName::new("route", name, "round-robin, least, hash, kv"))
    }
}

/// A request as the router sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prompt<'r> {
    pub(super) at: Duration,
    pub(super) tokens: u32,
    pub(super) blocks: &'r [Block],
    pub(super) block_size: NonZeroU32,
    pub(super) tokens_per_second: u32,
}

impl Prompt<'_> {
    /// Returns the tokens that are reused if this many blocks are cached: the last one of a prompt
    /// is always computed.
    pub(super) fn hit_tokens(&self, cached: usize) -> u32 {
        let tokens = to_u64(cached) * u64::from(self.block_size.get());
        let most = self.tokens.saturating_sub(1);
        u32::try_from(tokens).unwrap_or(u32::MAX).min(most)
    }

    /// Returns the time that an instance computes if these tokens are reused.
    pub(super) fn prefill_time(&self, hit_tokens: u32) -> Duration {
        const SECOND: u64 = 1_000_000_000;
        assert!(hit_tokens <= self.tokens, "a prompt reuses its own tokens");
        let tokens = u64::from(self.tokens - hit_tokens);
        let nanos = (tokens * SECOND).checked_div(self.tokens_per_second.into());
        Duration::from_nanos(nanos.unwrap_or(u64::MAX))
    }
}

/// What a route knows between two requests.
#[derive(Debug)]
pub(super) struct Router {
    route: Route,
    /// The instance after the one chosen last: where a search begins, and the first of equal ones.
    turn: usize,
    /// Places of the instances on the ring of hashes, in ascending order; empty for other routes.
    ring: Vec<(u64, u32)>,
    index: Index,
    found: Found,
}

/// Places of an instance on the ring of hashes.
const PLACES: u64 = 16;

impl Router {
    pub(super) fn new(route: Route, instances: usize) -> Self {
        let places = |instance: u32| {
            let first = u64::from(instance) * PLACES;
            (first..first + PLACES).map(move |place| (mix(mix(place)), instance))
        };
        let hashed = if route == Route::Hash { to_u32(instances) } else { 0 };
        let mut ring: Vec<_> = (0..hashed).flat_map(places).collect();
        ring.sort_unstable();
        Self { route, turn: 0, ring, index: Index::default(), found: Found::new(instances) }
    }

    /// Takes over an event of an instance.
    pub(super) fn read(&mut self, instance: usize, event: &Event) {
        self.index.read(instance, event);
    }

    /// Chooses the instance of a request. `free_at` says when each one has computed what it was
    /// sent before.
    pub(super) fn choose(&mut self, prompt: &Prompt<'_>, free_at: &[Duration]) -> usize {
        let wait = |instance: usize| free_at[instance].saturating_sub(prompt.at);
        let instances = (self.turn..free_at.len()).chain(0..self.turn);
        // The first of equal ones.
        let chosen = match self.route {
            Route::RoundRobin => Some(self.turn),
            Route::Least => instances.min_by_key(|instance| wait(*instance)),
            Route::Hash => self.hashed(prompt.blocks),
            Route::Kv => {
                self.index.find(prompt.blocks, &mut self.found);
                let (found, whole) = (self.found.blocks(), prompt.prefill_time(0));
                instances.min_by_key(|instance| {
                    let compute = match found[*instance] {
                        0 => whole,
                        blocks => prompt.prefill_time(prompt.hit_tokens(to_usize(blocks))),
                    };
                    let wait = wait(*instance);
                    (compute + wait, wait)
                })
            }
        };
        let chosen = chosen.unwrap_or(0);
        self.turn = (chosen + 1) % free_at.len().max(1);
        chosen
    }

    /// Returns the instance at the next place of the ring.
    fn hashed(&self, blocks: &[Block]) -> Option<usize> {
        let block = blocks.get(1).or(blocks.first())?;
        let hash = mix(*block);
        let place = self.ring.partition_point(|(place, _)| *place < hash);
        let (_, instance) = self.ring.get(place).or(self.ring.first())?;
        Some(to_usize(*instance))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(at: u64, tokens: u32, blocks: &[Block]) -> Prompt<'_> {
        let block_size = NonZeroU32::new(10).expect("10");
        Prompt { at: Duration::from_secs(at), tokens, blocks, block_size, tokens_per_second: 5 }
    }

    fn seconds(times: &[u64]) -> Vec<Duration> {
        times.iter().copied().map(Duration::from_secs).collect()
    }

    #[test]
    fn every_route_has_a_name_in_the_error() {
        let error = "random".parse::<Route>().expect_err("no route").to_string();
        let (_, names) = error.split_once("expected one of ").expect("names");
        let names: Vec<_> = names.split(", ").map(str::to_owned).collect();
        assert_eq!(names, Route::ALL.map(|route| route.to_string()));
        for (name, route) in names.iter().zip(Route::ALL) {
            assert_eq!(name.parse(), Ok(route));
        }
    }

    #[test]
    fn the_last_token_of_a_prompt_is_always_computed() {
        let prompt = prompt(0, 25, &[1, 2, 3]);
        assert_eq!([0, 1, 2, 3].map(|cached| prompt.hit_tokens(cached)), [0, 10, 20, 24]);
        assert_eq!(prompt.prefill_time(20), Duration::from_secs(1));
    }

    #[test]
    fn equal_instances_take_turns() {
        for (route, expected) in [
            (Route::RoundRobin, [0, 1, 2, 0]),
            (Route::Least, [0, 2, 0, 2]),
            (Route::Kv, [0, 2, 0, 2]),
        ] {
            let mut router = Router::new(route, 3);
            // The second one has work until 9.
            let free_at = seconds(&[3, 9, 4]);
            let chosen = [(); 4].map(|()| router.choose(&prompt(5, 20, &[1, 2]), &free_at));
            assert_eq!(chosen, expected, "{route}");
        }
    }

    #[test]
    fn kv_weighs_tokens_to_compute_against_those_that_wait() {
        let mut router = Router::new(Route::Kv, 3);
        router.read(1, &Event::Changed { stored: vec![1, 2, 3], evicted: vec![] });
        router.read(2, &Event::Changed { stored: vec![1], evicted: vec![] });
        let prompt = prompt(10, 40, &[1, 2, 3, 4]);
        // To compute: 8, 2 and 6 seconds.
        for (free_at, expected) in [
            ([0, 10, 10], 1),
            ([0, 13, 10], 1),
            ([0, 15, 10], 2),
            ([0, 17, 13], 0),
            ([14, 16, 12], 2),
        ] {
            assert_eq!(router.choose(&prompt, &seconds(&free_at)), expected, "{free_at:?}");
        }
        // 8 seconds each: those that wait least.
        assert_eq!(router.choose(&prompt, &seconds(&[10, 16, 12])), 0);
    }

    #[test]
    fn few_prompts_move_when_a_fleet_grows() {
        let [small, large] = [50, 51].map(|instances| Router::new(Route::Hash, instances));
        let chosen = |router: &Router, block| router.hashed(&[7, block, 8]).expect("an instance");
        let moved = (0..10_000).filter(|block| chosen(&small, *block) != chosen(&large, *block));
        let moved: Vec<_> = moved.collect();
        assert!(moved.iter().all(|block| chosen(&large, *block) == 50), "to the new one");
        assert!((50..600).contains(&moved.len()), "{}", moved.len());
        let share =
            |instance| (0..10_000).filter(|block| chosen(&small, *block) == instance).count();
        assert!((0..50).all(|instance| (40..800).contains(&share(instance))), "about 200 each");
        assert_eq!(small.hashed(&[3]), small.hashed(&[9, 3]), "the only block");
    }
}
