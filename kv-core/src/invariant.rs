//! Unwrapping of what only a bug of this crate could leave empty.

/// Turns a broken invariant into a panic that names it.
///
/// Input of the caller never comes here: it is refused with a typed error.
pub(crate) trait Invariant<T> {
    /// Takes the value out; `holds` is the sentence that is true of a correct cache.
    ///
    /// # Panics
    /// When there is no value.
    fn invariant(self, holds: &str) -> T;
}

impl<T> Invariant<T> for Option<T> {
    #[inline]
    #[track_caller]
    fn invariant(self, holds: &str) -> T {
        match self {
            Some(value) => value,
            None => broken(holds),
        }
    }
}

impl<T, E> Invariant<T> for Result<T, E> {
    #[inline]
    #[track_caller]
    fn invariant(self, holds: &str) -> T {
        self.ok().invariant(holds)
    }
}

#[cold]
#[inline(never)]
#[track_caller]
fn broken(holds: &str) -> ! {
    unreachable!("broken invariant: {holds}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "broken invariant: a row has an owner")]
    fn a_missing_value_names_the_invariant() {
        None::<u32>.invariant("a row has an owner");
    }

    #[test]
    fn a_value_is_handed_out() {
        assert_eq!(Some(3).invariant("there is one"), 3);
        assert_eq!(Ok::<_, ()>(4).invariant("there is one"), 4);
    }
}
