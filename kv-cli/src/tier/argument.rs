//! The parser of arguments that may hold a password.
use std::ffi::OsStr;
use std::marker::PhantomData;
use std::str::FromStr;

use clap::builder::TypedValueParser;
use clap::error::ErrorKind;
use clap::{Arg, Command, Error};

use kv::tier::TierAddress;

/// Parses an address of a store. A refused address is part of the error without its account, where
/// clap's own parsers print the argument as it was given.
#[derive(Debug)]
pub(crate) struct AddressParser<T>(PhantomData<fn() -> T>);

impl<T> AddressParser<T> {
    pub(crate) const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<T> Clone for AddressParser<T> {
    fn clone(&self) -> Self {
        Self::new()
    }
}

impl<T> TypedValueParser for AddressParser<T>
where
    T: FromStr<Err: std::error::Error> + Clone + Send + Sync + 'static,
{
    type Value = T;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<T, Error> {
        let refuse = |problem: &dyn std::fmt::Display| {
            let shown = TierAddress::without_account(&value.to_string_lossy());
            let name = arg.map_or_else(String::new, |arg| format!(" for '{arg}'"));
            let message = format!("invalid value '{shown}'{name}: {problem}");
            command.clone().error(ErrorKind::ValueValidation, message)
        };
        let text = value.to_str().ok_or_else(|| refuse(&"the text is not UTF-8"))?;
        text.parse().map_err(|error: T::Err| refuse(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::Place;

    fn refusal<T>(text: &str) -> String
    where
        T: FromStr<Err: std::error::Error> + Clone + Send + Sync + 'static,
    {
        let arg = Arg::new("tier").long("tier").value_name("TIER");
        let command = Command::new("kv").arg(arg.value_parser(AddressParser::<T>::new()));
        let parsed = command.try_get_matches_from(["kv", "--tier", text]);
        parsed.expect_err("refused").to_string()
    }

    #[test]
    fn a_password_is_in_no_error() {
        for text in [
            "redis://me:secret@host:99999",
            "redis://me:se/secret@host",
            "redis://me:secret@host?speed=high",
            "redis//me:secret@host",
            "rediss://:secret@host",
            "http://me:secret@host",
            "me:secret@host",
            "s3://key:secret@bucket?zone=1",
        ] {
            for error in [refusal::<TierAddress>(text), refusal::<Place>(&format!("x://{text}"))] {
                assert!(!error.contains("secret"), "{error}");
                assert!(error.contains("@host") || error.contains("@bucket"), "{error}");
                assert!(error.contains("'--tier <TIER>'"), "{error}");
            }
        }
    }

    #[test]
    fn other_arguments_are_shown_as_given() {
        let error = refusal::<TierAddress>("disk=a@b");
        assert!(error.contains("'disk=a@b'") && error.contains("has no size"), "{error}");
        let error = refusal::<TierAddress>("tape=1");
        assert!(error.contains("'tape=1'"), "{error}");
    }
}
