//! The HTTP client below `object_store`: TLS, and failures by the status of an answer.
use std::error::Error;
use std::sync::Once;

use futures_util::future::{BoxFuture, FutureExt as _};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};

use crate::store::StoreErrorKind;

/// Makes clients that report statuses as errors where `object_store` keeps them to itself.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        install_tls();
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Checked(client)))
    }
}

#[derive(Debug)]
struct Checked(HttpClient);

impl HttpService for Checked {
    fn call<'a, 'b>(
        &'a self,
        request: HttpRequest,
    ) -> BoxFuture<'b, Result<HttpResponse, HttpError>>
    where
        'a: 'b,
        Self: 'b,
    {
        let lists = request.uri().query().is_some_and(|query| query.contains("list-type="));
        let answer = async move {
            let response = self.0.execute(request).await?;
            match Refusal::of(response.status().as_u16(), lists) {
                Some(refusal) => Err(HttpError::new(HttpErrorKind::Request, refusal)),
                None => Ok(response),
            }
        };
        answer.boxed()
    }
}

/// A failure by the status of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the server answers with status {status}")]
struct Refusal {
    status: u16,
    kind: StoreErrorKind,
}

impl Refusal {
    /// Returns the failure of a status; `None` for success, and for errors of `object_store`.
    fn of(status: u16, lists: bool) -> Option<Self> {
        let kind = match status {
            // The bucket.
            404 if lists => StoreErrorKind::Denied,
            // No part of the object is in the range, which begins with the first byte: it is empty.
            416 => StoreErrorKind::Corrupt,
            507 => StoreErrorKind::Full,
            408 | 429 | 500 | 502..=504 => StoreErrorKind::Unavailable,
            _ => return None,
        };
        Some(Self { status, kind })
    }
}

/// Finds the cause in a chain of errors.
pub(super) fn kind(error: &(dyn Error + 'static)) -> StoreErrorKind {
    let mut found = StoreErrorKind::Other;
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(refusal) = error.downcast_ref::<Refusal>() {
            return refusal.kind;
        }
        if let Some(error) = error.downcast_ref::<HttpError>() {
            found = match error.kind() {
                HttpErrorKind::Timeout => StoreErrorKind::Timeout,
                HttpErrorKind::Decode => StoreErrorKind::Corrupt,
                _ => StoreErrorKind::Unavailable,
            };
        }
        next = error.source();
    }
    found
}

/// Installs a provider of cryptography for TLS, unless the program has one: the HTTP client looks
/// for that of the process.
fn install_tls() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            // It fails if another thread was quicker, which is as good.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_decides_before_the_protocol() {
        for (status, expected) in [
            (503, StoreErrorKind::Unavailable),
            (500, StoreErrorKind::Unavailable),
            (429, StoreErrorKind::Unavailable),
            (507, StoreErrorKind::Full),
            (416, StoreErrorKind::Corrupt),
        ] {
            let refusal = Refusal::of(status, false).unwrap();
            let refusal = HttpError::new(HttpErrorKind::Request, refusal);
            let error = object_store::Error::Generic { store: "S3", source: Box::new(refusal) };
            assert_eq!(kind(&error), expected, "{status}");
        }
        for status in [200, 206, 301, 403, 404, 409, 412, 501] {
            assert_eq!(Refusal::of(status, false), None, "{status}");
        }
        assert_eq!(Refusal::of(404, true).unwrap().kind, StoreErrorKind::Denied);
        let plain = |kind| HttpError::new(kind, std::io::Error::other("x"));
        assert_eq!(kind(&plain(HttpErrorKind::Connect)), StoreErrorKind::Unavailable);
        assert_eq!(kind(&plain(HttpErrorKind::Timeout)), StoreErrorKind::Timeout);
        assert_eq!(kind(&std::io::Error::other("x")), StoreErrorKind::Other);
    }
}
