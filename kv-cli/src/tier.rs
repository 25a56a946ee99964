//! Addresses of tiers and of stores: the argument of `--tier`, and the place that `kv tier` looks
//! at.
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context as _;
#[cfg(feature = "object")]
use kv::tier::object::ObjectStore;
#[cfg(feature = "redis")]
use kv::tier::redis::RedisStore;
use kv::tier::{BlockStore, MemoryStore};

use crate::memory::Bytes;

/// A lower tier and its size: `host=2GiB`, `disk=DIR:200GB`, `redis://..`, `s3://..`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TierArg {
    /// Host memory.
    Host { bytes: u64 },
    /// A folder.
    Disk { folder: PathBuf, bytes: u64 },
    /// A store of another system, which knows its size itself.
    Store(StoreUrl),
}

impl TierArg {
    /// Opens the store. A folder is created, a server not connected to.
    pub(crate) fn open(&self) -> anyhow::Result<Box<dyn BlockStore>> {
        match self {
            Self::Host { bytes } => {
                let capacity = usize::try_from(*bytes).context("host memory")?;
                Ok(Box::new(MemoryStore::new(capacity)))
            }
            #[cfg(target_os = "linux")]
            Self::Disk { folder, bytes } => {
                let options = kv::tier::DiskOptions::new(*bytes);
                Ok(Box::new(kv::tier::DiskStore::open(folder, options)?))
            }
            #[cfg(not(target_os = "linux"))]
            Self::Disk { .. } => Err(TierArgError::NoFolders.into()),
            Self::Store(url) => Ok(url.open()?),
        }
    }
}

impl FromStr for TierArg {
    type Err = TierArgError;

    fn from_str(text: &str) -> Result<Self, TierArgError> {
        if let Some(size) = text.strip_prefix("host=") {
            return Ok(Self::Host { bytes: parse_size(size)? });
        }
        if let Some(rest) = text.strip_prefix("disk=") {
            let no_size = || TierArgError::NoSize { given: rest.to_owned() };
            let (folder, size) = rest.rsplit_once(':').ok_or_else(no_size)?;
            if folder.is_empty() {
                return Err(TierArgError::NoFolder { given: rest.to_owned() });
            }
            return Ok(Self::Disk { folder: folder.into(), bytes: parse_size(size)? });
        }
        if text.contains("://") {
            return Ok(Self::Store(text.parse()?));
        }
        Err(TierArgError::Form { given: text.to_owned() })
    }
}

/// Writes no password.
impl fmt::Display for TierArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host { bytes } => write!(f, "host={bytes}"),
            Self::Disk { folder, bytes } => write!(f, "disk={}:{bytes}", folder.display()),
            Self::Store(url) => url.fmt(f),
        }
    }
}

/// The URL of a store that was built in, checked as far as it can be without a connection.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct StoreUrl {
    kind: StoreKind,
    url: String,
}

/// Kinds of stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreKind {
    /// Redis or Valkey.
    Redis,
    /// S3.
    S3,
}

impl StoreUrl {
    /// Opens the store, without a connection.
    pub(crate) fn open(&self) -> Result<Box<dyn BlockStore>, TierArgError> {
        match self.kind {
            #[cfg(feature = "redis")]
            StoreKind::Redis => Ok(Box::new(RedisStore::from_url(&self.url)?)),
            #[cfg(not(feature = "redis"))]
            StoreKind::Redis => Err(TierArgError::NotBuilt { store: "Redis", feature: "redis" }),
            #[cfg(feature = "object")]
            StoreKind::S3 => Ok(Box::new(ObjectStore::from_url(&self.url)?)),
            #[cfg(not(feature = "object"))]
            StoreKind::S3 => Err(TierArgError::NotBuilt { store: "S3", feature: "object" }),
        }
    }
}

impl FromStr for StoreUrl {
    type Err = TierArgError;

    fn from_str(text: &str) -> Result<Self, TierArgError> {
        let (scheme, _) = text.split_once("://").unwrap_or((text, ""));
        let kind = match scheme {
            "redis" | "valkey" => StoreKind::Redis,
            "s3" => StoreKind::S3,
            "rediss" | "valkeys" => return Err(TierArgError::Tls { scheme: scheme.to_owned() }),
            other => return Err(TierArgError::Scheme { given: other.to_owned() }),
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

fn parse_size(text: &str) -> Result<u64, TierArgError> {
    let refused = |problem: String| TierArgError::Size { given: text.to_owned(), problem };
    match text.parse() {
        Ok(Bytes(0)) => Err(refused("a tier of no bytes keeps nothing".to_owned())),
        Ok(Bytes(bytes)) => Ok(bytes),
        Err(problem) => Err(refused(problem)),
    }
}

/// An address that names no tier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TierArgError {
    #[error("{given:?} is no tier: host=SIZE, disk=DIR:SIZE, redis://.. or s3://.. is expected")]
    Form { given: String },
    #[error("disk={given} has no size, as in disk={given}:20GiB")]
    NoSize { given: String },
    #[error("disk={given} has no folder, as in disk=cache{given}")]
    NoFolder { given: String },
    #[error("size {given:?}: {problem}")]
    Size { given: String, problem: String },
    #[error("{given}:// is no store: redis, valkey and s3 are")]
    Scheme { given: String },
    #[error(
        "{scheme}:// is Redis over TLS, which is not supported: use redis:// over a private \
         network or a tunnel"
    )]
    Tls { scheme: String },
    #[cfg(not(all(feature = "redis", feature = "object")))]
    #[error("{store} is not in this program: it was built without feature `{feature}` of kv-cli")]
    NotBuilt { store: &'static str, feature: &'static str },
    #[cfg(not(target_os = "linux"))]
    #[error("folders of chunks need Linux")]
    NoFolders,
    #[cfg(any(feature = "redis", feature = "object"))]
    #[error(transparent)]
    Url(#[from] kv::tier::StoreUrlError),
}
