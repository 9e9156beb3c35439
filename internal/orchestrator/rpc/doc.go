// Package rpc implements the calls of nodes (NodeService, over TLS) and of operators (OperatorService, on a unix
// socket). Calls read from package cache and write to package store.
package rpc
