// Package netns creates and removes named network namespaces, runs functions and commands in namespaces, opens netlink
// handles in them, and repeats interrupted netlink calls.
//
// A thread that has entered a namespace does not return to Go's scheduler: it ends when its function ends. So no other
// goroutine can run in the wrong namespace.
package netns
