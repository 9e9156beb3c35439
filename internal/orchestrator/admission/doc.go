// Package admission decides which connections and calls an orchestrator accepts: it verifies certificates of nodes and
// the join token, and enforces limits on connections, calls, rates and sizes. It accepts or refuses a call before
// package rpc reads its request.
package admission
