"""Grafana: dashboards as code; nothing here is imported by the product."""
