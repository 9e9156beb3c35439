// Package sysdump collects the state of a node in one archive, for remote diagnosis. Each part is in the archive, or
// its error is; daemons may be stopped. The archive has no secrets because parts are of types without keys, or of
// messages without fields of bytes. Logs are not filtered.
package sysdump
