//! The address of a server, as the command line gives it.
use std::fmt;
use std::str::FromStr;

use hyper::Uri;

/// An address that no load can be sent to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AddressError {
    #[error("not a URL: {0}")]
    Syntax(String),
    #[error("it starts with {got:?}, expected http://HOST[:PORT]")]
    Scheme { got: String },
    #[error("https is not spoken: give the http address of the server itself")]
    Tls,
    #[error("a user in the URL is not sent: give the key with --api-key")]
    User,
    #[error("{got:?} has no port that is a number from 0 to 65535")]
    Port { got: String },
    #[error("the query {got:?} has no meaning here")]
    Query { got: String },
}

/// The address of a server, without the path of a route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    /// Ends without `/`.
    base: String,
}

impl Address {
    /// Returns the URI of a route, which starts with `/`.
    pub(super) fn route(&self, route: &str) -> Result<Uri, AddressError> {
        let uri = format!("{}{route}", self.base);
        uri.parse()
            .map_err(|error: hyper::http::uri::InvalidUri| AddressError::Syntax(error.to_string()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.base)
    }
}

impl FromStr for Address {
    type Err = AddressError;

    /// Takes the address with or without `/v1` at its end, as clients of OpenAI give it.
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let uri: Uri = text.parse().map_err(|error: hyper::http::uri::InvalidUri| {
            AddressError::Syntax(error.to_string())
        })?;
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return Err(AddressError::Scheme { got: text.chars().take(40).collect() });
        };
        match scheme {
            "http" => {}
            "https" => return Err(AddressError::Tls),
            other => return Err(AddressError::Scheme { got: format!("{other}://") }),
        }
        if authority.as_str().contains('@') {
            return Err(AddressError::User);
        }
        if authority.port_u16().is_none() && authority.as_str() != authority.host() {
            return Err(AddressError::Port { got: authority.to_string() });
        }
        if let Some(query) = uri.query() {
            return Err(AddressError::Query { got: query.to_owned() });
        }
        let path = uri.path().trim_end_matches('/');
        let path = path.strip_suffix("/v1").unwrap_or(path);
        Ok(Self { base: format!("http://{authority}{path}") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_is_below_the_address() {
        for (text, route) in [
            ("http://127.0.0.1:8080", "http://127.0.0.1:8080/v1/models"),
            ("http://[::1]", "http://[::1]/v1/models"),
            ("http://127.0.0.1:8080/", "http://127.0.0.1:8080/v1/models"),
            ("http://localhost/v1", "http://localhost/v1/models"),
            ("http://[::1]:80/some/v1/", "http://[::1]:80/some/v1/models"),
            ("HTTP://host/llm", "http://host/llm/v1/models"),
        ] {
            let address: Address = text.parse().expect(text);
            assert_eq!(address.route("/v1/models").expect(text).to_string(), route);
        }
    }

    #[test]
    fn other_addresses_are_refused_with_words() {
        for (text, words) in [
            ("https://host", "https is not spoken"),
            ("host:8080", "expected http://HOST"),
            ("127.0.0.1:8080", "expected http://HOST"),
            ("ftp://host", "\"ftp://\""),
            ("/v1", "expected http://HOST"),
            ("http://", "not a URL"),
            ("http://host:port", "\"host:port\" has no port"),
            ("http://host:65536", "no port"),
            ("http://user:word@host", "--api-key"),
            ("http://host/?a=b", "\"a=b\""),
            ("", "not a URL"),
        ] {
            let error = text.parse::<Address>().expect_err(text).to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
