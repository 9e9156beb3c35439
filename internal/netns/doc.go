// Package netns works inside network namespaces: it makes and removes named ones, runs functions
// and commands in them, and opens netlink handles there that survive interrupted dumps.
//
// A thread that entered a namespace is never released to Go's scheduler: it ends with the
// function it ran. So no other goroutine can ever find itself in a foreign namespace.
package netns
