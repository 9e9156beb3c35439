// Package control is the agent's client of the orchestrator: it registers the node, follows the stream and applies its
// events to the core, lists mappings, resolves tenants and apps, and allocates addresses. It decodes and checks the
// messages. What follows from them is decided in package agent.
package control
