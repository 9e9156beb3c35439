// Package state keeps the identity of a node in its state directory: node.json, gateways.json and the instance of this
// boot. The version and the folders of the agent's other files are defined here too.
package state
