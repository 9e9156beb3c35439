// Package cniserver implements CNI 1.1.0 and 1.0.0 in the agent: it parses the requests of the plugin (package
// cniclient), calls AgentService in this process, and returns results and errors in CNI's format. It makes no decisions
// and changes no kernel objects.
package cniserver
