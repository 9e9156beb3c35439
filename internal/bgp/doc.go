// Package bgp has what the BGP speakers of an orchestrator share: peers and their text form, and how GoBGP is started.
// Which routes they exchange is in packages speaker (network evpn) and announce (addresses of services).
package bgp
