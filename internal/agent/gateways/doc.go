// Package gateways probes the egress gateways that containers of this node use, so that new connections avoid those
// that do not answer.
package gateways
