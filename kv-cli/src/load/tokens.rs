//! Tokens made from numbers: equal seeds are equal text, and nothing else is.
use crate::mix::mix;

/// The seed of a run of tokens, such as the id of a block.
pub(super) type Seed = [u32; 3];

/// Makes tokens of a vocabulary.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tokens {
    /// Lowest token; special ones are below it.
    pub(super) first: u32,
    /// Tokens of the vocabulary, more than `first`.
    pub(super) vocab: u32,
    /// Another one makes other tokens of everything.
    pub(super) seed: u64,
}

impl Tokens {
    /// Returns the token at a position of a prompt whose text there has this seed.
    pub(super) fn token(&self, seed: Seed, position: u32) -> u32 {
        let start = mix(self.seed);
        let words = seed.into_iter().chain([position]);
        let hash = words.fold(start, |hash, word| mix(hash ^ u64::from(word)));
        let count = u64::from(self.vocab.saturating_sub(self.first)).max(1);
        let offset = hash.checked_rem(count).and_then(|offset| u32::try_from(offset).ok());
        self.first + offset.unwrap_or(0)
    }
}

/// Returns a number in 0..1 for each index, the same for the same seed.
pub(super) fn uniform(seed: u64, index: u32) -> f64 {
    let bits = mix(mix(seed) ^ u64::from(index)) >> 32;
    f64::from(u32::try_from(bits).unwrap_or(0)) / 4_294_967_296.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENS: Tokens = Tokens { first: 3, vocab: 256, seed: 0 };

    fn run(tokens: Tokens, seed: Seed) -> Vec<u32> {
        (0..1000).map(|position| tokens.token(seed, position)).collect()
    }

    #[test]
    fn tokens_are_those_of_the_vocabulary() {
        let run = run(TOKENS, [7, 0, 0]);
        assert_eq!((run.iter().min(), run.iter().max()), (Some(&3), Some(&255)));
        assert_eq!(Tokens { first: 3, vocab: 4, ..TOKENS }.token([1, 2, 3], 4), 3);
        let wide = Tokens { first: 0, vocab: u32::MAX, ..TOKENS };
        assert!((0..100).any(|position| wide.token([1, 2, 3], position) > 1 << 31));
    }

    #[test]
    fn equal_seeds_alone_are_equal_text() {
        let one = run(TOKENS, [7, 0, 0]);
        assert_eq!(one, run(TOKENS, [7, 0, 0]));
        for seed in [[8, 0, 0], [0, 7, 0], [7, 0, 1]] {
            let other = run(TOKENS, seed);
            let equal = one.iter().zip(&other).filter(|(one, other)| one == other).count();
            assert!(equal < 20, "{equal} of 1000 are equal by chance");
        }
        assert_ne!(one, run(Tokens { seed: 1, ..TOKENS }, [7, 0, 0]));
    }

    #[test]
    fn numbers_are_spread_evenly() {
        let numbers: Vec<_> = (0..10_000).map(|index| uniform(5, index)).collect();
        assert!(numbers.iter().all(|number| (0.0..1.0).contains(number)));
        let mean = numbers.iter().sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        assert_eq!(numbers[3].to_bits(), uniform(5, 3).to_bits());
    }
}
