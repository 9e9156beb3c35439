// Package service is what a service is: one stable address of a tenant for many containers, with Kubernetes'
// vocabulary. It reads and checks what people write, says which endpoints a client may get, and converts to and from
// protobuf messages. It is pure: no I/O, no clock.
package service
