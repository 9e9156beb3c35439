// Package cniserver is CNI (spec 1.1.0 and 1.0.0) in the agent: it reads what the plugin (package plugin) passes on
// from a runtime, calls AgentService in this process, and answers as the spec wants it. It decides nothing itself and
// touches no kernel object.
package cniserver
