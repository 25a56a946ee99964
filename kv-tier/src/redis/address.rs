//! Settings of a store in Redis, from its URL.
use std::fmt;
use std::time::Duration;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _};

use crate::remote::{Parameters, StoreUrlError, parse_duration, parse_url};

/// The settings of a URL.
pub(super) struct Settings {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    pub(super) db: i64,
    /// Written before the path of every key.
    pub(super) prefix: String,
    pub(super) ttl_ms: Option<u64>,
    pub(super) connections: usize,
}

impl Settings {
    /// Parses a URL.
    pub(super) fn parse(text: &str) -> Result<Self, StoreUrlError> {
        let mut url = parse_url(text)?;
        if !SCHEMES.contains(&url.scheme()) {
            let given = url.scheme().to_owned();
            return Err(StoreUrlError::Scheme { given, expected: "redis or valkey, without TLS" });
        }
        let mut parameters = Parameters::of(&url, &["prefix", "ttl", "connections"])?;
        let ttl = parameters.parse("ttl", "a time such as 3600, 90m, 12h or 7d", parse_duration)?;
        let connections = parameters.parse("connections", "1 to 16", |text| {
            text.parse().ok().filter(|count| (1..=CONNECTIONS_MAX).contains(count))
        })?;
        let prefix = parameters.take("prefix").unwrap_or_default();
        url.set_query(None);
        // The crate's words may hold a part of the URL, but not the password.
        let refused = |problem: String| StoreUrlError::Part { part: "address", problem };
        let info: ConnectionInfo =
            url.into_connection_info().map_err(|error| refused(error.to_string()))?;
        let ConnectionAddr::Tcp(host, port) = info.addr() else {
            return Err(refused(format!("{} is not a TCP address", info.addr())));
        };
        let account = info.redis_settings();
        if account.db() < 0 {
            return Err(refused(format!("database {} does not exist", account.db())));
        }
        if account.username().is_some() && account.password().is_none() {
            return Err(refused("a user without a password".to_owned()));
        }
        Ok(Self {
            host: host.clone(),
            port: *port,
            user: account.username().map(str::to_owned),
            password: account.password().map(str::to_owned),
            db: account.db(),
            prefix,
            ttl_ms: ttl.map(milliseconds),
            connections: connections.unwrap_or(CONNECTIONS),
        })
    }

    /// Returns the arguments of `AUTH`.
    pub(super) fn credentials(&self) -> Option<Vec<&str>> {
        let password = self.password.as_deref()?;
        Some(self.user.as_deref().into_iter().chain([password]).collect())
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("host", &self.host)
            .field("port", &self.port)
            .field("user", &self.user)
            .field("has_password", &self.password.is_some())
            .field("db", &self.db)
            .field("prefix", &self.prefix)
            .field("ttl_ms", &self.ttl_ms)
            .field("connections", &self.connections)
            .finish()
    }
}

/// Redis counts in 63 bits.
fn milliseconds(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX).min(TTL_MS_MAX)
}

const SCHEMES: [&str; 2] = ["redis", "valkey"];
const CONNECTIONS: usize = 2;
const CONNECTIONS_MAX: usize = 16;
/// A thousand years: the server adds the time of day.
const TTL_MS_MAX: u64 = 1_000 * 365 * 86_400_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_sets_everything() {
        let url = "valkey://me:p%40ss@[::1]:7000/5?prefix=llama%3A&ttl=7d&connections=4";
        let settings = Settings::parse(url).unwrap();
        assert_eq!((settings.host.as_str(), settings.port, settings.db), ("::1", 7000, 5));
        assert_eq!(settings.credentials(), Some(vec!["me", "p@ss"]));
        assert_eq!(settings.prefix, "llama:");
        assert_eq!(settings.ttl_ms, Some(604_800_000));
        assert_eq!(settings.connections, 4);
    }

    #[test]
    fn a_host_alone_is_enough() {
        let settings = Settings::parse("redis://cache").unwrap();
        assert_eq!((settings.host.as_str(), settings.port, settings.db), ("cache", 6379, 0));
        assert_eq!(settings.credentials(), None);
        assert_eq!((settings.ttl_ms, settings.connections), (None, 2));
        let settings = Settings::parse("redis://:secret@cache").unwrap();
        assert_eq!(settings.credentials(), Some(vec!["secret"]));
    }

    #[test]
    fn bad_urls_are_refused_by_their_part() {
        let error = |url: &str| Settings::parse(url).unwrap_err();
        assert!(matches!(error("cache:6379/x"), StoreUrlError::Scheme { .. }));
        assert!(
            matches!(error("rediss://h"), StoreUrlError::Scheme { given, .. } if given == "rediss")
        );
        assert!(matches!(error("redis://h:99999"), StoreUrlError::Syntax { .. }));
        for bad in ["redis://h/x", "redis://h/-1", "redis:///0", "redis://0.0.0.0", "redis://me@h"]
        {
            assert!(matches!(error(bad), StoreUrlError::Part { part: "address", .. }), "{bad}");
        }
        let unknown = error("redis://h?protocol=resp3");
        assert!(
            matches!(unknown, StoreUrlError::UnknownParameter { name, .. } if name == "protocol")
        );
        for (bad, parameter) in [
            ("connections=0", "connections"),
            ("connections=17", "connections"),
            ("ttl=0", "ttl"),
            ("ttl=soon", "ttl"),
        ] {
            let found = error(&format!("redis://h?{bad}"));
            assert!(
                matches!(found, StoreUrlError::Parameter { name, .. } if name == parameter),
                "{bad}"
            );
        }
        assert!(matches!(
            error("redis://h?ttl=1&ttl=2"),
            StoreUrlError::RepeatedParameter { name: "ttl" }
        ));
    }

    #[test]
    fn an_endless_time_is_a_long_one() {
        let settings = Settings::parse("redis://h?ttl=99999999999d").unwrap();
        assert_eq!(settings.ttl_ms, Some(TTL_MS_MAX));
    }
}
