// Package servicemap makes the kernel's maps hold the services of the tenants of a node: frontends, sets of backends,
// and the addresses of backends.
package servicemap
