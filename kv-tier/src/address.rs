//! Addresses of tiers and of stores, as text.
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::bytes::{Bytes, BytesError};
use crate::listing::ListChunks;
use crate::memory::MemoryStore;
#[cfg(feature = "object")]
use crate::object::ObjectStore;
#[cfg(feature = "redis")]
use crate::redis::RedisStore;
use crate::store::BlockStore;

/// A lower tier and its size: `host=2GiB`, `disk=DIR:200GB`, `redis://..`, `s3://..`.
///
/// ```
/// use kv::tier::TierAddress;
/// let tier: TierAddress = "disk=/var/kv:1MiB".parse()?;
/// assert_eq!(tier, TierAddress::Disk { folder: "/var/kv".into(), bytes: 1 << 20 });
/// assert_eq!("host=1KiB".parse::<TierAddress>()?.to_string(), "host=1024");
/// # Ok::<(), kv::tier::TierAddressError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a caller handles each of them")]
pub enum TierAddress {
    /// Host memory.
    Host {
        /// Its size.
        bytes: u64,
    },
    /// A folder.
    Disk {
        /// Its path.
        folder: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// A store of another system, which knows its size itself.
    Store(StoreUrl),
}

impl TierAddress {
    /// Opens the store. A folder is created, a server not connected to.
    ///
    /// # Errors
    /// [`TierAddressError::Folder`] for a folder that cannot be used;
    /// [`TierAddressError::NoFolders`] on systems without that store;
    /// [`TierAddressError::HostTooLarge`] for more memory than the host addresses.
    pub fn open(&self) -> Result<Box<dyn BlockStore>, TierAddressError> {
        match self {
            Self::Host { bytes } => {
                let too_large = |_| TierAddressError::HostTooLarge { bytes: *bytes };
                let capacity = usize::try_from(*bytes).map_err(too_large)?;
                Ok(Box::new(MemoryStore::new(capacity)))
            }
            #[cfg(target_os = "linux")]
            Self::Disk { folder, bytes } => {
                let options = crate::disk::DiskOptions::new(*bytes);
                Ok(Box::new(crate::disk::DiskStore::open(folder, options)?))
            }
            #[cfg(not(target_os = "linux"))]
            Self::Disk { .. } => Err(TierAddressError::NoFolders),
            Self::Store(url) => {
                let store: Box<dyn BlockStore> = url.open()?;
                Ok(store)
            }
        }
    }

    /// Returns an address without user and password: without everything up to its last `@`, because
    /// the account of a malformed URL may end anywhere. For messages about text that is no address.
    pub fn without_account(text: &str) -> String {
        if text.starts_with("disk=") || text.starts_with("host=") {
            return text.to_owned();
        }
        let Some((account, rest)) = text.rsplit_once('@') else { return text.to_owned() };
        let scheme = account.split_once("://").map_or("", |(scheme, _)| scheme);
        let end = if scheme.is_empty() { "" } else { "://" };
        format!("{scheme}{end}..@{rest}")
    }
}

impl FromStr for TierAddress {
    type Err = TierAddressError;

    fn from_str(text: &str) -> Result<Self, TierAddressError> {
        if let Some(size) = text.strip_prefix("host=") {
            return Ok(Self::Host { bytes: parse_size(size)? });
        }
        if let Some(rest) = text.strip_prefix("disk=") {
            let no_size = || TierAddressError::NoSize { given: rest.to_owned() };
            let (folder, size) = rest.rsplit_once(':').ok_or_else(no_size)?;
            if folder.is_empty() {
                return Err(TierAddressError::NoFolder { given: rest.to_owned() });
            }
            return Ok(Self::Disk { folder: folder.into(), bytes: parse_size(size)? });
        }
        if text.contains("://") {
            return Ok(Self::Store(text.parse()?));
        }
        Err(TierAddressError::Form { given: Self::without_account(text) })
    }
}

/// Writes no password.
impl fmt::Display for TierAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host { bytes } => write!(f, "host={bytes}"),
            Self::Disk { folder, bytes } => write!(f, "disk={}:{bytes}", folder.display()),
            Self::Store(url) => url.fmt(f),
        }
    }
}

/// The URL of a store that was built in, checked as far as it can be without a connection. Written
/// without its password.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreUrl {
    kind: StoreKind,
    url: String,
}

/// Kinds of stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StoreKind {
    /// Redis or Valkey.
    Redis,
    /// S3.
    S3,
}

impl StoreUrl {
    /// Opens the store, without a connection.
    ///
    /// # Errors
    /// [`TierAddressError::NotBuilt`], and `TierAddressError::Url` for a wrong URL.
    pub fn open(&self) -> Result<Box<dyn ListChunks>, TierAddressError> {
        match self.kind {
            #[cfg(feature = "redis")]
            StoreKind::Redis => Ok(Box::new(RedisStore::from_url(&self.url)?)),
            #[cfg(not(feature = "redis"))]
            StoreKind::Redis => {
                Err(TierAddressError::NotBuilt { store: "Redis", feature: "redis" })
            }
            #[cfg(feature = "object")]
            StoreKind::S3 => Ok(Box::new(ObjectStore::from_url(&self.url)?)),
            #[cfg(not(feature = "object"))]
            StoreKind::S3 => Err(TierAddressError::NotBuilt { store: "S3", feature: "object" }),
        }
    }
}

impl FromStr for StoreUrl {
    type Err = TierAddressError;

    fn from_str(text: &str) -> Result<Self, TierAddressError> {
        let (scheme, _) = text.split_once("://").unwrap_or((text, ""));
        let kind = match scheme {
            "redis" | "valkey" => StoreKind::Redis,
            "s3" => StoreKind::S3,
            "rediss" | "valkeys" => {
                return Err(TierAddressError::Tls { scheme: scheme.to_owned() });
            }
            other => return Err(TierAddressError::Scheme { given: other.to_owned() }),
        };
        let url = Self { kind, url: text.to_owned() };
        url.open()?;
        Ok(url)
    }
}

/// Writes no password.
impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, rest) = self.url.split_once("://").unwrap_or(("", &self.url));
        let authority = rest.split(['/', '?']).next().unwrap_or_default();
        let rest = match authority.rsplit_once('@') {
            Some((account, _)) => rest.get(account.len()..).unwrap_or_default(),
            None => rest,
        };
        write!(f, "{scheme}://{}", rest.strip_prefix('@').unwrap_or(rest))
    }
}

/// Writes no password.
impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreUrl({self})")
    }
}

fn parse_size(text: &str) -> Result<u64, TierAddressError> {
    let given = || text.to_owned();
    match text.parse() {
        Ok(Bytes(0)) => Err(TierAddressError::Empty { given: given() }),
        Ok(Bytes(bytes)) => Ok(bytes),
        Err(problem) => Err(TierAddressError::Size { given: given(), problem }),
    }
}

/// An address that names no tier, or one that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TierAddressError {
    /// It has none of the forms.
    #[error("{given:?} is no tier: host=SIZE, disk=DIR:SIZE, redis://.. or s3://.. is expected")]
    Form {
        /// The text, without an account.
        given: String,
    },
    /// A folder without a size.
    #[error("disk={given} has no size, as in disk={given}:20GiB")]
    NoSize {
        /// The text after `disk=`.
        given: String,
    },
    /// A size without a folder.
    #[error("disk={given} has no folder, as in disk=cache{given}")]
    NoFolder {
        /// The text after `disk=`.
        given: String,
    },
    /// A text that is no size.
    #[error("size {given:?}: {problem}")]
    Size {
        /// The text.
        given: String,
        /// The problem.
        problem: BytesError,
    },
    /// A size of 0.
    #[error("size {given:?}: a tier of no bytes keeps nothing")]
    Empty {
        /// The text.
        given: String,
    },
    /// A scheme that no store has.
    #[error("{given}:// is no store: redis, valkey and s3 are")]
    Scheme {
        /// The scheme.
        given: String,
    },
    /// Redis over TLS.
    #[error(
        "{scheme}:// is Redis over TLS, which is not supported: use redis:// over a private \
         network or a tunnel"
    )]
    Tls {
        /// The scheme.
        scheme: String,
    },
    /// A store that exists but was not built in.
    #[error("{store} is not in this program: it was built without feature `{feature}`")]
    NotBuilt {
        /// The store.
        store: &'static str,
        /// The feature that has it.
        feature: &'static str,
    },
    /// A folder, on a system without that store.
    #[error("folders of chunks need Linux")]
    NoFolders,
    /// More memory than this host addresses.
    #[error("host={bytes}: more than this host addresses")]
    HostTooLarge {
        /// The bytes.
        bytes: u64,
    },
    /// The folder cannot be used.
    #[cfg(target_os = "linux")]
    #[error(transparent)]
    Folder(#[from] crate::disk::DiskOpenError),
    /// The URL of a store is wrong.
    #[cfg(any(feature = "redis", feature = "object"))]
    #[error(transparent)]
    Url(#[from] crate::remote::StoreUrlError),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tier(text: &str) -> TierAddress {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn tiers_have_sizes() {
        for (text, bytes) in
            [("host=2GiB", 2 << 30), ("host=20GB", 20_000_000_000), ("host=512MiB", 512 << 20)]
        {
            assert_eq!(tier(text), TierAddress::Host { bytes });
        }
        for (text, folder, bytes) in [
            ("disk=cache:4096", "cache", 4_096),
            ("disk=/var/kv:200GB", "/var/kv", 200_000_000_000),
            ("disk=a:b=c/d e:1.5KiB", "a:b=c/d e", 1_536),
        ] {
            assert_eq!(tier(text), TierAddress::Disk { folder: folder.into(), bytes });
        }
    }

    #[test]
    fn what_is_no_tier_is_refused_by_its_part() {
        let error = |text: &str| text.parse::<TierAddress>().expect_err(text);
        for text in ["", "2GiB", "host", "memory=2GiB", "HOST=2GiB", "cache:2GiB"] {
            assert!(
                matches!(error(text), TierAddressError::Form { given } if given == text),
                "{text}"
            );
        }
        for text in ["host=", "host=two", "host=-1", "disk=cache:"] {
            assert!(matches!(error(text), TierAddressError::Size { .. }), "{text}");
        }
        for text in ["host=0", "disk=c:0B"] {
            assert!(matches!(error(text), TierAddressError::Empty { .. }), "{text}");
        }
        let no_size = error("disk=cache");
        assert!(matches!(&no_size, TierAddressError::NoSize { given } if given == "cache"));
        let no_folder = error("disk=:2GiB");
        assert!(matches!(&no_folder, TierAddressError::NoFolder { given } if given == ":2GiB"));
        for scheme in ["rediss", "valkeys"] {
            let tls = error(&format!("{scheme}://host"));
            assert!(matches!(&tls, TierAddressError::Tls { scheme: given } if given == scheme));
        }
        for text in ["gs://bucket", "file:///cache", "://x", "memory:///x"] {
            assert!(matches!(error(text), TierAddressError::Scheme { .. }), "{text}");
        }
    }

    #[cfg(feature = "redis")]
    #[test]
    fn redis_is_checked_without_a_server() {
        for text in ["redis://host", "valkey://me:secret@host:7000/2?prefix=a:&ttl=7d"] {
            let TierAddress::Store(url) = tier(text) else { panic!("{text}") };
            assert_eq!(url.kind, StoreKind::Redis);
        }
        for text in ["redis://", "redis://host?speed=high", "redis://host:99999"] {
            let error = text.parse::<TierAddress>().expect_err(text);
            assert!(matches!(error, TierAddressError::Url(_)), "{text}: {error}");
        }
    }

    #[cfg(not(feature = "redis"))]
    #[test]
    fn redis_names_its_feature() {
        let error = "redis://host".parse::<TierAddress>().expect_err("it is not built in");
        assert!(matches!(error, TierAddressError::NotBuilt { store: "Redis", feature: "redis" }));
    }

    #[cfg(feature = "object")]
    #[test]
    fn s3_is_checked_without_a_server() {
        let url = "s3://bucket/prefix?endpoint=http://127.0.0.1:9000&allow_http=true";
        let TierAddress::Store(url) = tier(url) else { panic!("a store") };
        assert_eq!(url.kind, StoreKind::S3);
        let error = "s3://bucket?zone=1".parse::<TierAddress>().expect_err("no such parameter");
        assert!(matches!(error, TierAddressError::Url(_)), "{error}");
    }

    #[cfg(not(feature = "object"))]
    #[test]
    fn s3_names_its_feature() {
        let error = "s3://bucket/prefix".parse::<TierAddress>().expect_err("it is not built in");
        assert!(matches!(error, TierAddressError::NotBuilt { store: "S3", feature: "object" }));
        assert!(error.to_string().contains("feature `object`"), "{error}");
    }

    #[cfg(feature = "redis")]
    #[test]
    fn an_account_is_not_shown() {
        for (url, shown) in [
            ("redis://me:p%40ss@host:7000/2?prefix=a@b", "redis://host:7000/2?prefix=a@b"),
            ("redis://:pass@host", "redis://host"),
            ("redis://host/1?prefix=x@y", "redis://host/1?prefix=x@y"),
        ] {
            let url = tier(url);
            assert_eq!(url.to_string(), shown);
            assert!(!format!("{url:?}").contains("pass"), "{url:?}");
        }
        assert_eq!(tier("disk=cache:1KiB").to_string(), "disk=cache:1024");
        assert_eq!(tier("host=1KiB").to_string(), "host=1024");
    }

    #[test]
    fn tiers_are_opened() {
        use std::time::{Duration, Instant};

        let folder = tempfile::tempdir().expect("a folder");
        let disk = format!("disk={}:1MiB", folder.path().join("new").display());
        let chunk = crate::ChunkAddress {
            root: crate::ChunkName::new([1; 32]),
            name: crate::ChunkName::new([2; 32]),
        };
        let soon = Instant::now() + Duration::from_secs(20);
        for text in ["host=1MiB", &disk] {
            let store = tier(text).open().expect(text);
            store.put(&chunk, b"bytes", soon).expect(text);
            assert_eq!(store.get(&chunk, &mut [0; 8], soon).expect(text), Some(5));
        }
        let bad = format!("disk={}:1MiB", folder.path().display());
        assert!(tier(&bad).open().is_err(), "a folder with other content");
    }
}
