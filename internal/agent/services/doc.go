// Package services keeps the services of the tenants that a node hosts: it writes to the packet path which endpoints
// clients on this node get, and reports this node's own containers that services select. It decides nothing about
// endpoints: package service does.
package services
