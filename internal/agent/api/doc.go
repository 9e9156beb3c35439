// Package api serves the agent's unix socket: the CNI plugin, AgentService for operators, metrics and health. It
// converts requests and answers, and measures calls. It keeps no state of endpoints and tenants, and decides nothing
// about them.
package api
