// Package bgp has what the BGP speakers of an orchestrator share: peers and their text form, and how GoBGP is started.
// Which routes they exchange is in the packages that use it.
package bgp
