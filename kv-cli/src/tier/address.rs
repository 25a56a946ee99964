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
use kv::tier::{BlockStore, ListChunks, MemoryStore};

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
        Err(TierArgError::Form { given: without_account(text) })
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

/// A place of chunks: a folder, given by its path or as `--tier` takes it, or a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    Folder(PathBuf),
    Store(StoreUrl),
}

impl Place {
    /// Opens the place. Nothing is created, and no server connected to.
    pub(crate) fn open(&self) -> anyhow::Result<Box<dyn ListChunks>> {
        match self {
            #[cfg(target_os = "linux")]
            Self::Folder(folder) => Ok(Box::new(kv::tier::DiskFolder::open(folder)?)),
            #[cfg(not(target_os = "linux"))]
            Self::Folder(_) => Err(TierArgError::NoFolders.into()),
            Self::Store(url) => Ok(url.open()?),
        }
    }
}

impl FromStr for Place {
    type Err = TierArgError;

    fn from_str(text: &str) -> Result<Self, TierArgError> {
        if !text.contains("://") && !text.starts_with("host=") && !text.starts_with("disk=") {
            return Ok(Self::Folder(text.into()));
        }
        match text.parse()? {
            TierArg::Host { .. } => Err(TierArgError::HostMemory),
            TierArg::Disk { folder, .. } => Ok(Self::Folder(folder)),
            TierArg::Store(url) => Ok(Self::Store(url)),
        }
    }
}

/// Writes no password.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(folder) => folder.display().fmt(f),
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
    pub(crate) fn open(&self) -> Result<Box<dyn ListChunks>, TierArgError> {
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

/// Returns an address without user and password: without everything up to its last `@`, because the
/// account of a malformed URL may end anywhere.
pub(super) fn without_account(text: &str) -> String {
    if text.starts_with("disk=") || text.starts_with("host=") {
        return text.to_owned();
    }
    let Some((account, rest)) = text.rsplit_once('@') else { return text.to_owned() };
    let scheme = account.split_once("://").map_or("", |(scheme, _)| scheme);
    let end = if scheme.is_empty() { "" } else { "://" };
    format!("{scheme}{end}..@{rest}")
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
    #[error("host memory belongs to one process, nobody else can look at it")]
    HostMemory,
    #[cfg(any(feature = "redis", feature = "object"))]
    #[error(transparent)]
    Url(#[from] kv::tier::StoreUrlError),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tier(text: &str) -> TierArg {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn tiers_have_sizes() {
        for (text, bytes) in
            [("host=2GiB", 2 << 30), ("host=20GB", 20_000_000_000), ("host=512MiB", 512 << 20)]
        {
            assert_eq!(tier(text), TierArg::Host { bytes });
        }
        for (text, folder, bytes) in [
            ("disk=cache:4096", "cache", 4_096),
            ("disk=/var/kv:200GB", "/var/kv", 200_000_000_000),
            ("disk=a:b=c/d e:1.5KiB", "a:b=c/d e", 1_536),
        ] {
            assert_eq!(tier(text), TierArg::Disk { folder: folder.into(), bytes });
        }
    }

    #[test]
    fn what_is_no_tier_is_refused_by_its_part() {
        let error = |text: &str| text.parse::<TierArg>().expect_err(text);
        for text in ["", "2GiB", "host", "memory=2GiB", "HOST=2GiB", "cache:2GiB"] {
            assert_eq!(error(text), TierArgError::Form { given: text.to_owned() });
        }
        for text in ["host=", "host=0", "host=two", "host=-1", "disk=cache:", "disk=c:0B"] {
            assert!(matches!(error(text), TierArgError::Size { .. }), "{text}");
        }
        assert_eq!(error("disk=cache"), TierArgError::NoSize { given: "cache".to_owned() });
        assert_eq!(error("disk=:2GiB"), TierArgError::NoFolder { given: ":2GiB".to_owned() });
        for scheme in ["rediss", "valkeys"] {
            let tls = error(&format!("{scheme}://host"));
            assert_eq!(tls, TierArgError::Tls { scheme: scheme.to_owned() });
        }
        for text in ["gs://bucket", "file:///cache", "://x", "memory:///x"] {
            assert!(matches!(error(text), TierArgError::Scheme { .. }), "{text}");
        }
    }

    #[cfg(feature = "redis")]
    #[test]
    fn redis_is_checked_without_a_server() {
        for text in ["redis://host", "valkey://me:secret@host:7000/2?prefix=a:&ttl=7d"] {
            let TierArg::Store(url) = tier(text) else { panic!("{text}") };
            assert_eq!(url.kind, StoreKind::Redis);
        }
        for text in ["redis://", "redis://host?speed=high", "redis://host:99999"] {
            let error = text.parse::<TierArg>().expect_err(text);
            assert!(matches!(error, TierArgError::Url(_)), "{text}: {error}");
        }
    }

    #[cfg(not(feature = "redis"))]
    #[test]
    fn redis_names_its_feature() {
        let error = "redis://host".parse::<TierArg>().expect_err("it is not built in");
        assert_eq!(error, TierArgError::NotBuilt { store: "Redis", feature: "redis" });
    }

    #[cfg(feature = "object")]
    #[test]
    fn s3_is_checked_without_a_server() {
        let url = "s3://bucket/prefix?endpoint=http://127.0.0.1:9000&allow_http=true";
        let TierArg::Store(url) = tier(url) else { panic!("a store") };
        assert_eq!(url.kind, StoreKind::S3);
        let error = "s3://bucket?zone=1".parse::<TierArg>().expect_err("no such parameter");
        assert!(matches!(error, TierArgError::Url(_)), "{error}");
    }

    #[cfg(not(feature = "object"))]
    #[test]
    fn s3_names_its_feature() {
        let error = "s3://bucket/prefix".parse::<TierArg>().expect_err("it is not built in");
        assert_eq!(error, TierArgError::NotBuilt { store: "S3", feature: "object" });
        assert!(error.to_string().contains("feature `object` of kv-cli"), "{error}");
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
    fn a_place_is_a_folder_or_a_store() {
        let place = |text: &str| text.parse::<Place>();
        for text in ["cache", "disk=cache:20GiB"] {
            assert_eq!(place(text), Ok(Place::Folder("cache".into())));
        }
        assert_eq!(place("host=2GiB"), Err(TierArgError::HostMemory));
        assert!(matches!(place("disk=cache"), Err(TierArgError::NoSize { .. })));
        assert!(matches!(place("http://x"), Err(TierArgError::Scheme { .. })));
    }

    #[test]
    fn tiers_are_opened() {
        use std::time::{Duration, Instant};

        let folder = tempfile::tempdir().expect("a folder");
        let disk = format!("disk={}:1MiB", folder.path().join("new").display());
        let chunk = kv::tier::ChunkAddress {
            root: kv::tier::ChunkName::new([1; 32]),
            name: kv::tier::ChunkName::new([2; 32]),
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
