//! A client of the crate `object_store` for a URI, with the credentials of its environment.

use crate::aws_profile::ProfileKeys;
use crate::http::Connector;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, RetryConfig};
use std::sync::Arc;
use udm_core::DeviceControlError;
use udm_core::errno::EINVAL;
use udm_wire::uri::{ObjectScheme, ObjectUri};
use udm_wire::words::quote_for_error_line;

/// A store, and the name of the object in it.
pub(crate) struct ObjectLocation {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) path: Path,
}

/// Makes a client for the object of `uri`. Contacts no server.
///
/// # Errors
/// EINVAL: the environment does not suffice, or is not valid.
pub(crate) fn connect(uri: &ObjectUri) -> Result<ObjectLocation, DeviceControlError> {
    let refuse = |why: String| DeviceControlError::new(EINVAL, format!("{uri}: {why}"));
    let path = Path::parse(&uri.key).map_err(|_| refuse("no valid name of an object".into()))?;
    let connector = Connector::new().map_err(refuse)?;
    // `source` repeats requests itself, because it knows the deadline and logs.
    let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    let store = make_store(uri, connector, retry).map_err(|error| {
        refuse(format!("can't be used with this environment: {}", quote_for_error_line(&error.to_string())))
    })?;
    Ok(ObjectLocation { store, path })
}

fn make_store(
    uri: &ObjectUri,
    connector: Connector,
    retry: RetryConfig,
) -> object_store::Result<Arc<dyn ObjectStore>> {
    let bucket = &uri.authority;
    Ok(match uri.scheme {
        ObjectScheme::Https | ObjectScheme::Http => {
            // The URI was checked: http is allowed for this host.
            let options = ClientOptions::new().with_allow_http(uri.scheme == ObjectScheme::Http);
            let builder = HttpBuilder::new().with_url(format!("{}://{bucket}", uri.scheme));
            let builder = builder.with_client_options(options).with_retry(retry);
            Arc::new(builder.with_http_connector(connector).build()?)
        }
        ObjectScheme::S3 => {
            let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry);
            if let Some(keys) = ProfileKeys::from_environment() {
                builder = builder
                    .with_access_key_id(keys.access_key_id)
                    .with_secret_access_key(keys.secret_access_key);
                builder = match keys.session_token {
                    Some(token) => builder.with_token(token),
                    None => builder,
                };
            }
            Arc::new(builder.with_http_connector(connector).build()?)
        }
        ObjectScheme::Gs => {
            let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket).with_retry(retry);
            Arc::new(builder.with_http_connector(connector).build()?)
        }
        ObjectScheme::Az => {
            let builder = MicrosoftAzureBuilder::from_env().with_container_name(bucket).with_retry(retry);
            Arc::new(builder.with_http_connector(connector).build()?)
        }
    })
}
